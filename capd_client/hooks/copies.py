"""Keeps capd's hooks out of pickles and copies of a watched or emulated model.

torch keeps hooks in a module's own dictionary and pickles them with the module. A pickled model could then be read only
where capd is installed. `torch.load` with `weights_only`, its default, could not read it at all.

So `nn.Module.__reduce_ex__` is patched while something is watched. The patch leaves out capd's hooks, and the attribute
that marks emulated modules.
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
# `_reduce` calls this method. It is never cleared, because a patch of another library may still call `_reduce`.
_original: Callable[..., Any] = nn.Module.__reduce_ex__


def install() -> None:
    """Make modules leave out capd's hooks when they are pickled or copied. Calls nest; see `uninstall`."""
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1 and nn.Module.__reduce_ex__ is not _reduce:
            _original = nn.Module.__reduce_ex__
            nn.Module.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]


def uninstall() -> None:
    """Undo one `install`. If another library has patched the method since, capd's patch stays below it."""
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
