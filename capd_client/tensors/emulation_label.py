"""The emulation label of each record: "none", or the whole recipe that was active (`capd_client.emulate`).

The tensors of a product have the label of the model that holds its module. `capture` and the calls of `tensor_saver`
hand over tensors that belong to no module, so these have the label of the newest emulation. The label is part of a
capture's interned facts, so it costs a capture nothing. A change of the label discards the interned facts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["ATTRIBUTE", "NONE", "begin", "current", "follow", "text_of"]

ATTRIBUTE = "emulation"
"""The name of the attribute that holds the label."""

NONE = "none"

# The label of each emulation by its mark, in the order of their starts.
_texts: dict[object, str] = {}
_of_module: weakref.WeakKeyDictionary[nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()
_followers: list[weakref.WeakMethod[Any]] = []


def begin(models: Iterable[nn.Module], text: str) -> Callable[[], None]:
    """Label the records of these models and all their modules with `text`; return a function that ends it."""
    mark = object()
    modules = weakref.WeakSet(module for model in models for module in model.modules())
    _texts[mark] = text
    for module in modules:
        _of_module.setdefault(module, {})[mark] = text
    _changed()

    def end() -> None:
        if _texts.pop(mark, None) is None:
            return
        for module in modules:
            _of_module[module].pop(mark, None)
        _changed()

    return end


def text_of(module: nn.Module) -> str:
    """Return the label of the model that holds `module`."""
    texts = _of_module.get(module)
    return next(reversed(texts.values())) if texts else NONE


def current() -> str:
    """Return the label of the newest emulation that has not ended."""
    return next(reversed(_texts.values())) if _texts else NONE


def follow(changed: Callable[[], None]) -> None:
    """Call the bound method `changed` after every change, for as long as its object lives."""
    _followers[:] = [follower for follower in _followers if follower() is not None]
    _followers.append(weakref.WeakMethod(changed))


def _changed() -> None:
    for follower in tuple(_followers):
        changed = follower()
        if changed is not None:
            changed()
