"""A watched or emulated model is pickled and copied without what capd keeps on it.

torch keeps hooks in a module's own dictionary, and pickles them with it. A model saved whole would then be read only
where capd is installed, and not at all by `torch.load` with `weights_only`, its default. So while something is watched,
modules leave capd's hooks out of what they tell pickle and copy of themselves. So they do with the attribute by which
emulated modules are known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from capd_client.hooks.base import Hook

__all__ = ["EMULATION", "install", "uninstall"]

EMULATION = "_capd_emulation"
"""The attribute of emulated modules (`capd_client.emulation.plans`)."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

_lock = threading.Lock()
_users = 0
_original: Callable[..., Any] = nn.Module.__reduce_ex__  # what ours calls, never cleared


def install() -> None:
    """Have modules pickled without what capd keeps on them. Calls nest; see `uninstall`."""
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1 and nn.Module.__reduce_ex__ is not _reduce:
            _original = nn.Module.__reduce_ex__
            nn.Module.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]


def uninstall() -> None:
    """Undo one `install`. Where somebody patched the method after us, ours stays below theirs."""
    global _users
    with _lock:
        _users -= 1
        if not _users and nn.Module.__dict__.get("__reduce_ex__") is _reduce:
            if _original is object.__reduce_ex__:
                del nn.Module.__reduce_ex__
            else:
                nn.Module.__reduce_ex__ = _original  # type: ignore[method-assign]


def _reduce(module: nn.Module, protocol: Any) -> Any:
    reduced = _original(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = reduced[2]
    ours = {
        number for name in _HOOKS for number, hook in state.get(name, {}).items() if isinstance(hook, Hook)
    }
    if not ours and EMULATION not in state:
        return reduced
    left = {
        name: OrderedDict((number, value) for number, value in state[name].items() if number not in ours)
        for name in (*_HOOKS, *_ABOUT_HOOKS)
        if name in state
    }
    kept = {name: value for name, value in state.items() if name != EMULATION}
    return (*reduced[:2], {**kept, **left}, *reduced[3:])
