"""Modules that become CUDA graphs: `make_graphed_callables` of torch and of TransformerEngine.

Both functions refuse modules with hooks, and run a module a few times before they record it. So capd removes its hooks
during the call and treats the runs as trials. After the call, the hooks of a graphed module run around its replays. The
hooks of modules inside it never run again, and a warning reports this.

If the graph was created before the watch, the module's own forward attribute shows it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any, Optional

from torch import nn

from capd_client.hooks.base import Hook
from capd_client.process.log import RateLimitedLog
from capd_client.process.patching import patch
from capd_client.steps.trial_runs import trial
from capd_client.watching.watched import is_heard

__all__ = ["GRAPHING", "install", "say_replayed", "uninstall"]

GRAPHING = ("make_graphed_callables", ("torch.cuda.graphs", "transformer_engine.pytorch.graph"))
"""The name of the function and the modules that define it, as in `bootstrap/_capd_trials.py`."""

_NAME, _HOMES = GRAPHING
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

_Function = Callable[..., Any]

# Re-entrant, because a signal handler of the job may watch, too.
_lock = threading.RLock()
_users = 0
_undo: list[Callable[[], None]] = []
_notices = RateLimitedLog()


def install() -> None:
    """Remove capd's hooks whenever modules are turned into CUDA graphs. Calls nest; see `uninstall`."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _undo.extend(patch(holder, _NAME, _stepping_aside) for holder in _holders())


def uninstall() -> None:
    """Undo one `install`. The last call restores the libraries' own functions."""
    global _users
    with _lock:
        _users -= 1
        while _undo and not _users:
            _undo.pop()()


def _holders() -> list[Any]:
    """Return every Python module that has the function: the library's module, and modules that import it."""
    return [
        module
        for module in tuple(sys.modules.values())
        if _is_of_home(getattr(module, "__dict__", {}).get(_NAME))
    ]


def _is_of_home(function: object) -> bool:
    return isinstance(function, FunctionType) and function.__module__ in _HOMES


def _stepping_aside(function: _Function) -> _Function:
    @functools.wraps(function)
    def graphed(*args: Any, **kwargs: Any) -> Any:
        if not _users:
            return function(*args, **kwargs)
        modules = _modules_of(args, kwargs)
        with trial(), _without_hooks(modules):
            made = function(*args, **kwargs)
        _report({module: _replays_training(module) for module in modules if module.training})
        return made

    return graphed


def _modules_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that the call graphs: its first argument, `callables` in torch, `modules` elsewhere."""
    given = args[0] if args else kwargs.get("callables", kwargs.get("modules"))
    callables = given if isinstance(given, (tuple, list)) else (given,)
    return [each for each in callables if isinstance(each, nn.Module)]


@contextmanager
def _without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove capd's hooks from these modules and all modules inside, and put them back in the same order."""
    taken = [
        (hooks, list(hooks.items()))
        for module in dict.fromkeys(inner for module in modules for inner in module.modules())
        for name in _HOOKS
        if (hooks := vars(module).get(name)) and any(isinstance(hook, Hook) for hook in hooks.values())
    ]
    try:
        for hooks, before in taken:
            for number, hook in before:
                if isinstance(hook, Hook):
                    del hooks[number]
        yield
    finally:
        for hooks, before in taken:
            _put_back(hooks, before)


def _put_back(hooks: dict[int, Any], before: list[tuple[int, Any]]) -> None:
    """Restore the hooks in place, because the handles of all hooks refer to the dictionary.

    Hooks that the job added during the call come last.
    """
    now = dict(hooks)
    hooks.clear()
    hooks.update((number, hook) for number, hook in before if isinstance(hook, Hook) or number in now)
    hooks.update(now)


def say_replayed(models: Iterable[nn.Module]) -> None:
    """Report modules whose hooks never run, because a graph replays them already or is being created now.

    `capd run` finds a model in its first forward, which may be a warm-up run of the graph.
    """
    graphed = [module for model in models for module in model.modules() if _replays_training(module)]
    _report(dict.fromkeys((*graphed, *_under_way()), True))


def _under_way() -> list[nn.Module]:
    """Return the modules that this thread is turning into graphs."""
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == _NAME and frame.f_globals.get("__name__") in _HOMES:
            return [module for module in _modules_of((), frame.f_locals) if module.training]
        frame = frame.f_back
    return []


def _report(graphed: Mapping[nn.Module, bool]) -> None:
    """Report the modules that the replays do not call.

    Args:
        graphed: For each graphed module, whether its own hooks still run around its replays.
    """
    silent = dict.fromkeys(
        inner
        for module, called in graphed.items()
        for inner in module.modules()
        if not is_heard(inner, called=called and inner is module)
    )
    if silent:
        _notices.warn(
            "graphed",
            "%d watched modules are not captured: %s is replayed as a CUDA graph, which calls no hooks inside it. "
            "Capture its tensors with capd_client.static_tap",
            len(silent),
            ", ".join(dict.fromkeys(type(module).__name__ for module in graphed)),
        )


def _replays_training(module: nn.Module) -> bool:
    """Return whether the forward of this module replays a graph in training mode."""
    forward: Any = vars(module).get("forward")
    if not _is_of_home(forward):
        return False
    held = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    mode = held.get("graph_training_state")
    return mode is None or bool(mode.cell_contents)
