"""The base of the callables that torch stores in a watched model: picklable, and inert in copies.

A deepcopy or an unpickled model carries `_inert` in their place: it computes the same and is not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Hook"]


def _inert(*_args: Any, **_kwargs: Any) -> None:
    """What a hook becomes in a copy of its model."""


def _make_inert() -> Callable[..., None]:
    return _inert


class Hook:
    """Base of the hook objects: a deepcopy or a pickle of one does nothing."""

    __slots__ = ()
    __torch_unserializable__ = True  # saving a tensor that carries one warns otherwise

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_inert, ()
