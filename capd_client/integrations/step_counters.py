"""Lets frameworks that count their steps tell capd's clock where they are (capd_client.stepping.begin_counted).

Patches sit on their classes, hand everything through, and are taken off again by the last `uninstall`.

A framework may be imported, or found, when it trains already: whatever of it this thread is in counts from then on.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, Optional

from capd_client.integrations import framework_counters
from capd_client.integrations.counter_patches import Method, Patch, end_adopted, listen, unless_it_fails
from capd_client.integrations.megatron_schedule import schedule

__all__ = ["install", "look_again", "uninstall"]


class _Installed(NamedTuple):
    owner: Any
    original: FunctionType
    wrapper: Method


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
    fresh = [patch for patch in framework_counters.PATCHES if patch not in _installed and _put_on(patch)]
    for patch in fresh:
        if patch.begun is not None:
            unless_it_fails(patch.begun)
    if fresh:
        unless_it_fails(_adopt, fresh)


def _put_on(patch: Patch) -> bool:
    module = sys.modules.get(patch.module)
    owner = getattr(module, patch.owner, None) if patch.owner else module
    method = vars(owner).get(patch.method) if isinstance(owner, (type, ModuleType)) else None
    if not isinstance(method, FunctionType):
        return False
    wrapper = patch.wrap(method)
    setattr(owner, patch.method, wrapper)
    _installed[patch] = _Installed(owner, method, wrapper)
    return True


def _adopt(fresh: Sequence[Patch]) -> None:
    """Let those count whose methods this thread is in, the outermost first.

    Methods are known by their own code: what one decorator puts around several (torchtitan's) has one code for all.
    """
    patches = {inspect.unwrap(_installed[patch].original).__code__: patch for patch in fresh}
    found = []
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        patch = patches.get(frame.f_code)
        if patch is not None and patch.adopt is not None:
            found.append((patch.adopt, frame.f_locals[frame.f_code.co_varnames[0]]))
        frame = frame.f_back
    for adopt, owner in reversed(found):
        adopt(owner)


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
        framework_counters.end()
        end_adopted()
        for patch, (owner, original, wrapper) in tuple(_installed.items()):
            if vars(owner).get(patch.method) is wrapper:
                setattr(owner, patch.method, original)
                del _installed[patch]
