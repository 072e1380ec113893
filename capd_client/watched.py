"""The taps of one watched model, which `capd ctl select` narrows and widens while the job runs.

Narrowing leaves the hooks where they are: a tap that has nothing to capture costs as much as before, and a compiled
graph that holds it stays right. Widening taps Linear modules that `watch(select=...)` had left out, until another
selection leaves them out again.
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


class _Left(NamedTuple):
    """A Linear module that the job's own selection left out."""

    module: weakref.ref[nn.Linear]
    place: Place


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
        self._left: list[_Left] = []
        self._more: list[_Tapped] = []  # of those left out, the ones tapped now

    @property
    def taps(self) -> list[LinearTap]:
        """Those of the modules that the job selected."""
        return [own.tap for own in self._own]

    def attach(self, module: nn.Linear, place: Place) -> None:
        """Tap a module that the job selected."""
        self._tap(module, place, self._tensors, self._own)

    def leave_out(self, module: nn.Linear, place: Place) -> None:
        """Remember a module that the job did not select."""
        self._left.append(_Left(weakref.ref(module), place))

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
        self._untap(self._more)
        self._more = []
        for left in self._left if globs is not None else ():
            module = left.module()
            if module is not None and not is_tapped(module) and matches_any(left.place.module, globs or ()):
                self._tap(module, left.place, frozenset(tensors), self._more)
        return chosen + len(self._more) if takes_part else 0

    def remove(self) -> None:
        """Take every hook off again."""
        self._untap(self._own)
        self._untap(self._more)
        self._own, self._left, self._more = [], [], []

    def _tap(self, module: nn.Linear, place: Place, tensors: frozenset[str], taps: list[_Tapped]) -> None:
        tap = LinearTap(module, place, tensors, self._slices, self._sink, self.gate)
        tapped = _Tapped(tap, place, [])
        taps.append(tapped)  # first: what fails half-way is removed with the rest
        _tapped[module] = tap
        tapped.hooks.append(module.register_forward_pre_hook(PreHook(tap), with_kwargs=True))
        tapped.hooks.append(module.register_forward_hook(ForwardHook(tap), with_kwargs=True))

    def _untap(self, taps: list[_Tapped]) -> None:
        for tap, _, hooks in taps:
            for hook in hooks:
                hook.remove()
            tap.remove()
            module: Optional[nn.Module] = tap.module()
            if module is not None and _tapped.get(module) is tap:
                del _tapped[module]
