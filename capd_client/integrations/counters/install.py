"""Installs the patches through which frameworks report their step to capd's clock (capd_client.steps.clock).

The patches replace methods of classes and pass everything through. The last `uninstall` removes them.

Under `capd run` the methods are followed from their import on (`bootstrap/_capd_calls.py`). There a patch is
attached to the follower. It also sees calls through references that the job kept, calls that already run, and the
end of each call.

Without `capd run` a framework may already train when it is found. Then the frames of this thread show which calls
run.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, Optional

from capd_client.integrations.counters import frameworks
from capd_client.integrations.counters.megatron import schedule
from capd_client.integrations.counters.patches import (
    Method,
    Patch,
    adopt,
    end_adopted,
    enter,
    listen,
    unless_it_fails,
    wrapped,
)

__all__ = ["install", "look_again", "uninstall"]


class _Installed(NamedTuple):
    original: Method
    # The place of a followed method. None if the patch replaced the method of its class.
    place: Any
    # Returns whether the patch is gone.
    undo: Callable[[], bool]


# The lock is re-entrant, because a signal handler of the job may watch, too.
_lock = threading.RLock()
_users = 0
# The number of modules in the process at the last search for frameworks.
_modules = 0
_installed: dict[Patch, _Installed] = {}


def install() -> None:
    """Patch the frameworks that this process has imported. Calls nest; see `uninstall`. Never raises."""
    global _users
    with _lock:
        _users += 1
        listen(True)
        _patch_imported()


def look_again() -> None:
    """Patch the frameworks imported since the last look, and check whether Megatron's schedule still counts.

    Never raises.

    Every forward of a root calls this function, and usually nothing new was imported.
    """
    if schedule.counts:
        schedule.look()
    if len(sys.modules) != _modules:
        with _lock:
            if _users:
                _patch_imported()


def _patch_imported() -> None:
    global _modules
    _modules = len(sys.modules)
    fresh = [patch for patch in frameworks.PATCHES if patch not in _installed and _put_on(patch)]
    for patch in fresh:
        if patch.begun is not None:
            unless_it_fails(patch.begun)
    if fresh:
        unless_it_fails(_adopt, fresh)


def _put_on(patch: Patch) -> bool:
    place = getattr(_followed(), "places", {}).get((patch.module, patch.owner, patch.method))
    if place is not None:
        place.counted = wrapped(patch, place.method)
        _installed[patch] = _Installed(place.method, place, lambda: _leave(place))
        return True
    module = sys.modules.get(patch.module)
    owner = getattr(module, patch.owner, None) if patch.owner else module
    method = vars(owner).get(patch.method) if isinstance(owner, (type, ModuleType)) else None
    if not isinstance(method, FunctionType):
        return False
    wrapper = wrapped(patch, method)
    setattr(owner, patch.method, wrapper)
    _installed[patch] = _Installed(method, None, lambda: _take_off(owner, patch.method, method, wrapper))
    return True


def _followed() -> Optional[ModuleType]:
    """Return the module through which `capd run` follows methods from the start of this process."""
    return sys.modules.get("_capd_calls")


def _leave(place: Any) -> bool:
    place.counted = None
    return True


def _take_off(owner: Any, name: str, method: Method, wrapper: Method) -> bool:
    if vars(owner).get(name) is not wrapper:
        return False
    setattr(owner, name, method)
    return True


def _adopt(fresh: Sequence[Patch]) -> None:
    """Start the counters of the calls that this thread is in, the outermost call first."""
    at_places = {id(_installed[patch].place): patch for patch in fresh if _installed[patch].place is not None}
    for call in _followed().under_way() if at_places else ():  # type: ignore[union-attr]
        patch = at_places.get(id(call.place))
        if patch is None:
            continue
        # A known call already entered its own `around`.
        if not call.known or patch.adopt is not patch.around:
            call.known = True
            ended = enter(patch, *call.args, **call.kwargs)
            if patch.returned is not None:
                call.ended.append(functools.partial(_returned, patch.returned, call))
            if ended is not None:
                call.ended.append(ended)
    _adopt_frames([patch for patch in fresh if _installed[patch].place is None and patch.adopt is not None])


def _returned(returned: Callable[..., None], call: Any) -> None:
    """Report the result of a followed call. A call that failed has none."""
    if call.returned:
        unless_it_fails(returned, call.returned[0], *call.args, **call.kwargs)


def _adopt_frames(fresh: Sequence[Patch]) -> None:
    """Start the counters of the calls found in the frames of this thread.

    Methods are recognised by their innermost code. A decorator around several methods, as torchtitan has, shares
    one code.
    """
    patches = {inspect.unwrap(_installed[patch].original).__code__: patch for patch in fresh}
    found = []
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and patches:
        patch = patches.get(frame.f_code)
        if patch is not None:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            found.append((patch, [frame.f_locals[name] for name in names]))
        frame = frame.f_back
    for patch, arguments in reversed(found):
        adopt(patch, *arguments)


def uninstall() -> None:
    """Undo one `install`. The last call restores the frameworks' own methods.

    If somebody else patched a method later, our patch stays below theirs and passes everything through.
    """
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        listen(False)
        frameworks.end()
        end_adopted()
        for patch, installed in tuple(_installed.items()):
            if installed.undo():
                del _installed[patch]
