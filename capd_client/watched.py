"""The taps of one watched model, which `capd ctl select` narrows and widens while the job runs.

Every product of the model gets its hooks once, also those that `watch(select=...)` leaves out: the compiler
guards the hooks that a module has, never those that it lacks, so that the graph of a block without any would run for an
equal one that is watched, too, and nothing be captured there. Steering only says what each tap captures.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Optional

from torch import nn
from torch.utils.hooks import RemovableHandle

from capd_client.function_sites import FunctionSite
from capd_client.gate import Gate
from capd_client.hook_objects import ForwardHook, PreHook
from capd_client.key import Key
from capd_client.naming import Place
from capd_client.owners import owner_of
from capd_client.select import matches_any
from capd_client.sites import Site
from capd_client.slicing import Slice
from capd_client.taps import Sink, Tap
from capd_client.tool_messages import Steer

__all__ = ["Watched", "is_tapped"]

_Product = tuple[Optional[FunctionSite], str]

_tapped: weakref.WeakKeyDictionary[nn.Module, dict[_Product, Tap]] = weakref.WeakKeyDictionary()


def is_tapped(site: Site) -> bool:
    """Whether some watch captures this product."""
    return _product(site) in _tapped.get(site.module, {})


def _product(site: Site) -> _Product:
    """What tells the products of one module apart."""
    return site.function, site.suffix


class _Tapped(NamedTuple):
    tap: Tap
    product: _Product
    place: Place


class Watched:
    """One `watch`: `tensors` of its products, cut by `slices`, while `gate` is open."""

    def __init__(self, sink: Sink, gate: Gate, tensors: frozenset[str], slices: Mapping[str, Slice]) -> None:
        self.gate = gate
        self._sink = sink
        self._tensors = tensors
        self._slices = slices
        self._own: list[_Tapped] = []
        self._left: list[_Tapped] = []  # those that the job's own selection left out
        self._undo: list[Callable[[], None]] = []  # takes away what was put on modules and functions
        self._last: list[RemovableHandle] = []  # hooks that are to run last in front of a forward

    @property
    def taps(self) -> list[Tap]:
        """Those of the products that the job selected."""
        return [own.tap for own in self._own]

    def attach(self, site: Site, place: Place) -> None:
        """Tap a product that the job selected."""
        _claim(self._tap(site, place, self._tensors, self._own))

    def leave_out(self, site: Site, place: Place) -> None:
        """Put hooks where the job selected nothing; they trace nothing into graphs."""
        self._tap(site, place, frozenset(), self._left)

    def settle(self) -> None:
        """The first forward begins: what was put on the modules since may change the operands, so taps go behind it.

        Tensor parallelism and parameters that are gathered for each forward work by hooks on the modules.
        """
        for handle in self._last:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)

    def steer(self, steer: Steer) -> int:
        """Capture as told from now on, the thread that trains calling; returns how many products that are."""
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
            wanted = globs is not None and matches_any(left.place.module, globs) and _claim(left)
            left.tap.select(frozenset(tensors if wanted else ()))
            if not wanted:
                _give_up(left)
            chosen += wanted
        return chosen if takes_part else 0

    def steps_of(self, key: Key) -> Optional[str]:
        """The steps in which the job itself has this watch capture what has this key; None: it does not."""
        own = any(
            own.place.module == key.module
            and own.tap.kind.component == key.component
            and key.tensor_name.partition(".")[0] in self._tensors  # "weight.absmax": of a quantised one
            for own in self._own
        )
        return self.gate.own_steps.text if own else None

    def remove(self) -> None:
        """Take every hook off again."""
        for undo in self._undo:
            undo()
        for tapped in (*self._own, *self._left):
            tapped.tap.remove()
            _give_up(tapped)
        self._own, self._left, self._undo, self._last = [], [], [], []

    def _tap(self, site: Site, place: Place, tensors: frozenset[str], taps: list[_Tapped]) -> _Tapped:
        module = site.module
        tap = Tap(site, place, tensors, self._slices, self._sink, self.gate)
        tapped = _Tapped(tap, _product(site), place)
        taps.append(tapped)  # first: what fails half-way is removed with the rest
        if site.function is None:
            before = module.register_forward_pre_hook(PreHook(tap, site), with_kwargs=True)
            self._undo.append(before.remove)
            self._last.append(before)
            after = module.register_forward_hook(ForwardHook(tap, site), with_kwargs=True, prepend=True)
            self._undo.append(after.remove)
        else:
            owner = owner_of(module)
            owner.add(site.function.role, tap)
            self._undo.append(partial(owner.discard, tap))
            site.function.install(tap)
            self._undo.append(site.function.uninstall)
        return tapped


def _claim(tapped: _Tapped) -> bool:
    """Whether a tap may capture its product: no other watch does."""
    module = tapped.tap.module()
    if module is None:
        return False
    taps = _tapped.setdefault(module, {})
    return taps.setdefault(tapped.product, tapped.tap) is tapped.tap


def _give_up(tapped: _Tapped) -> None:
    """Undo `_claim`, if it was granted."""
    module = tapped.tap.module()
    taps = {} if module is None else _tapped.get(module, {})
    if module is not None and taps.get(tapped.product) is tapped.tap:
        del taps[tapped.product]
        if not taps:
            del _tapped[module]
