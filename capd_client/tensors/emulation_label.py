"""Which emulation each record says was active: "none", or the whole recipe (`capd_client.emulate`).

A product's tensors say that of the model which holds its module; what `capture` and the predecessor's calls hand over
belongs to no module, and says the one begun last. It is part of what is interned about a capture, so saying it costs
the capture nothing; a change has what was interned forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["ATTRIBUTE", "NONE", "begin", "current", "follow", "text_of"]

ATTRIBUTE = "emulation"
"""The name of the attribute."""

NONE = "none"

_texts: dict[object, str] = {}  # by what `begin` returned, in the order of their beginnings
_of_module: weakref.WeakKeyDictionary[nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()
_followers: list[weakref.WeakMethod[Any]] = []


def begin(models: Iterable[nn.Module], text: str) -> Callable[[], None]:
    """From now on the records of these models, with all their modules, say `text`; returns what ends that."""
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
    """The emulation that is active in the model which holds `module`."""
    texts = _of_module.get(module)
    return next(reversed(texts.values())) if texts else NONE


def current() -> str:
    """The one begun last that has not ended."""
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
