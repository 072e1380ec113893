"""The base class of the hooks that torch stores in a watched model.

A deepcopied or unpickled model has `_inert` in place of each hook. It computes the same and is not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Hook"]


def _inert(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing. It replaces a hook in a copy of its model."""


def _make_inert() -> Callable[..., None]:
    return _inert


class Hook:
    """A hook that can be deepcopied and pickled; its copy does nothing."""

    __slots__ = ()
    # Without this attribute, torch warns when a tensor with such a hook is saved.
    __torch_unserializable__ = True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_inert, ()
