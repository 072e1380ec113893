"""Lets frameworks that count their steps tell capd's clock where they are (capd_client.steps.clock.begin_counted).

Patches sit on their classes, hand everything through, and are taken off again by the last `uninstall`. Under `capd run`
the methods are followed from their import on (`bootstrap/_capd_calls.py`): there patches sit on what follows, see calls
through references that the job kept, and are told of the calls that are under way, and of their end.

Elsewhere a framework may train already when it is found: whatever of it this thread is in is known by its frames.
"""

from __future__ import annotations

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
    place: Any  # of a method that is followed; None: the patch sits on its class
    undo: Callable[[], bool]  # returns whether the patch is gone


_lock = threading.RLock()  # re-entrant: a signal handler of the job may watch, too
_users = 0
_modules = 0  # of the process, when it was last looked for those of frameworks
_installed: dict[Patch, _Installed] = {}


def install() -> None:
    """Patch the frameworks that this process has imported. Calls nest; see `uninstall`. Never raises."""
    global _users
    with _lock:
        _users += 1
        listen(True)
        _patch_imported()


def look_again() -> None:
    """Patch what has been imported since: asked in every forward of a root, as a rule nothing was. Never raises.

    Whether Megatron's schedule still counts is looked at there, too.
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
    """What `capd run` follows since this process began."""
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
    """Let those count whose methods this thread is in, the outermost first."""
    at_places = {id(_installed[patch].place): patch for patch in fresh if _installed[patch].place is not None}
    for call in _followed().under_way() if at_places else ():  # type: ignore[union-attr]  # it has places
        patch = at_places.get(id(call.place))
        if patch is None:
            continue
        if (
            not call.known or patch.adopt is not patch.around
        ):  # a call that is known holds what is around it, itself
            call.known = True
            ended = enter(patch, *call.args, **call.kwargs)
            if ended is not None:
                call.ended.append(ended)
    _adopt_frames([patch for patch in fresh if _installed[patch].place is None and patch.adopt is not None])


def _adopt_frames(fresh: Sequence[Patch]) -> None:
    """The same by the frames of this thread.

    Methods are known by their own code: what one decorator puts around several (torchtitan's) has one code for all.
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
    """Undo one `install`; the last one puts the frameworks' own methods back.

    Where someone patched them after us, ours stay below theirs and pass everything through.
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
