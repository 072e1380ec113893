"""Keeps capd's hooks out of pickles and copies of a watched or emulated model.

torch keeps hooks in a module's own dictionary and pickles them with the module. A pickled model could then be read only
where capd is installed. `torch.load` with `weights_only`, its default, could not read it at all.

So `nn.Module.__reduce_ex__` is patched while something is watched. The patch leaves out capd's hooks, and the attribute
that marks emulated modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from capd_client.hooks.base import Hook
from capd_client.process.patching import patch

__all__ = ["EMULATION", "install", "uninstall"]

EMULATION = "_capd_emulation"
"""The attribute of emulated modules (`capd_client.emulation.plans`)."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

# The undo function of each user.
_undo: list[Callable[[], None]] = []


def install() -> None:
    """Make modules leave out capd's hooks when they are pickled or copied. Calls nest; see `uninstall`."""
    _undo.append(patch(nn.Module, "__reduce_ex__", _without_hooks))


def uninstall() -> None:
    """Undo one `install`. If another library has patched the method since, capd's patch stays below it."""
    _undo.pop()()


def _without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(module: nn.Module, protocol: Any) -> Any:
        reduced = original(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = reduced[2]
        ours = {
            number
            for name in _HOOKS
            for number, hook in state.get(name, {}).items()
            if isinstance(hook, Hook)
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

    return reduce
