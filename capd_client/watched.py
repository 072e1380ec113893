"""The taps of one watched model, which `capd ctl select` narrows and widens while the job runs.

Every Linear module of the model gets its hooks once, also those that `watch(select=...)` leaves out: the compiler
guards the hooks that a module has, never those that it lacks, so that the graph of a block without any would run for an
equal one that is watched, too, and nothing be captured there. Steering only says what each tap captures.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple, Optional

from torch import nn
from torch.utils.hooks import RemovableHandle

from capd_client.hook_objects import ForwardHook, PreHook
from capd_client.naming import Place
from capd_client.select import matches_any
from capd_client.slicing import Slice
from capd_client.stepping import Gate
from capd_client.taps import LinearTap, Sink
from capd_client.tool_messages import Steer

__all__ = ["Watched", "is_tapped"]

_tapped: weakref.WeakKeyDictionary[nn.Module, LinearTap] = weakref.WeakKeyDictionary()


def is_tapped(module: nn.Module) -> bool:
    """Whether some watch captures this module."""
    return module in _tapped


class _Tapped(NamedTuple):
    tap: LinearTap
    place: Place
    hooks: list[RemovableHandle]


class Watched:
    """One `watch`: `tensors` of its modules, cut by `slices`, while `gate` is open."""

    def __init__(self, sink: Sink, gate: Gate, tensors: frozenset[str], slices: Mapping[str, Slice]) -> None:
        self.gate = gate
        self._sink = sink
        self._tensors = tensors
        self._slices = slices
        self._own: list[_Tapped] = []
        self._left: list[_Tapped] = []  # those that the job's own selection left out

    @property
    def taps(self) -> list[LinearTap]:
        """Those of the modules that the job selected."""
        return [own.tap for own in self._own]

    def attach(self, module: nn.Linear, place: Place) -> None:
        """Tap a module that the job selected."""
        _tapped[module] = self._tap(module, place, self._tensors, self._own)

    def leave_out(self, module: nn.Linear, place: Place) -> None:
        """Put hooks on a module that the job did not select; they trace nothing into graphs."""
        self._tap(module, place, frozenset(), self._left)

    def steer(self, steer: Steer) -> int:
        """Capture as told from now on, the thread that trains calling; returns how many modules that are."""
        selection = steer.selection
        takes_part = self.gate.steer(selection, capturing=steer.capturing)
        globs = None if selection is None else selection.modules
        tensors = self._tensors if selection is None or selection.tensors is None else selection.tensors
        chosen = 0
        for own in self._own:
            wanted = globs is None or matches_any(own.place.module, globs)
            own.tap.select(frozenset(tensors if wanted else ()))
            chosen += wanted
        for left in self._left:
            wanted = globs is not None and matches_any(left.place.module, globs) and _claim(left.tap)
            left.tap.select(frozenset(tensors if wanted else ()))
            if not wanted:
                _give_up(left.tap)
            chosen += wanted
        return chosen if takes_part else 0

    def remove(self) -> None:
        """Take every hook off again."""
        for tap, _, hooks in (*self._own, *self._left):
            for hook in hooks:
                hook.remove()
            tap.remove()
            _give_up(tap)
        self._own, self._left = [], []

    def _tap(
        self, module: nn.Linear, place: Place, tensors: frozenset[str], taps: list[_Tapped]
    ) -> LinearTap:
        tap = LinearTap(module, place, tensors, self._slices, self._sink, self.gate)
        tapped = _Tapped(tap, place, [])
        taps.append(tapped)  # first: what fails half-way is removed with the rest
        tapped.hooks.append(module.register_forward_pre_hook(PreHook(tap), with_kwargs=True))
        tapped.hooks.append(module.register_forward_hook(ForwardHook(tap), with_kwargs=True))
        return tap


def _claim(tap: LinearTap) -> bool:
    """Whether `tap` may capture its module: no other watch does."""
    module: Optional[nn.Module] = tap.module()
    return module is not None and _tapped.setdefault(module, tap) is tap


def _give_up(tap: LinearTap) -> None:
    """Undo `_claim`, if it was granted."""
    module: Optional[nn.Module] = tap.module()
    if module is not None and _tapped.get(module) is tap:
        del _tapped[module]
