"""The taps of one watched model, which `capd ctl select` narrows and widens while the job runs.

Every product of the model gets its hooks once, also a product that `watch(select=...)` leaves out. The compiler guards
hooks that exist, not hooks that are missing. A graph compiled for an unwatched block would be reused for an identical
watched block, and nothing would be captured there. Steering only changes which tensors each tap captures.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

from torch import nn
from torch.utils.hooks import RemovableHandle

from capd_client.hooks.module_hooks import ForwardHook, PreHook
from capd_client.hooks.module_names import Place
from capd_client.hooks.owners import owner_of
from capd_client.hooks.sink import Sink
from capd_client.hooks.sites import Site
from capd_client.hooks.tap import Tap
from capd_client.protocol.control import Steer
from capd_client.protocol.key import Key
from capd_client.protocol.selection import Selection, matches_any
from capd_client.rules.resolve import Rule, Target, Wanted, rules_of, run_together
from capd_client.steps.collection import quota_of
from capd_client.steps.gate import Gate
from capd_client.tensors import emulation_label

__all__ = ["Watched", "is_heard", "is_tapped", "target_of"]

_Product = tuple[Any, str]

_tapped: weakref.WeakKeyDictionary[nn.Module, dict[_Product, Tap]] = weakref.WeakKeyDictionary()


def is_tapped(site: Site) -> bool:
    """Return whether a watch captures this product."""
    return _product(site) in _tapped.get(site.module, {})


def is_heard(module: nn.Module, *, called: bool) -> bool:
    """Return whether taps still see all products of a module whose own forward does not run.

    Args:
        module: A module of a replayed graph.
        called: Whether the module's own hooks still run around the replay.
    """
    return all(called and function is None for function, _ in _tapped.get(module, ()))


def _product(site: Site) -> _Product:
    """Return the part of a site that distinguishes the products of one module."""
    return site.function, site.suffix


def target_of(site: Site, place: Place) -> Target:
    """Return the product as rules see it."""
    kind, owner = site.kind, place.module.removesuffix(site.suffix)
    instead_of = tuple(owner + suffix for suffix in site.instead_of)
    default = frozenset(kind.default_tensors)
    return Target(place.module, place.layer, kind.component, kind.tensors, default, instead_of)


class _Tapped(NamedTuple):
    tap: Tap
    product: _Product
    target: Target
    # The wishes of the job's own rules, by tensor name.
    wanted: Mapping[str, Wanted]


class Watched:
    """One `watch`, and the taps of its products."""

    def __init__(self, sink: Sink, rules: Sequence[Rule], default: Rule) -> None:
        """Tap nothing yet.

        Args:
            sink: Receives the captures.
            rules: The job's own rules.
            default: The rule for products that the job's own rules leave out and `capd ctl` selects.
        """
        self._sink = sink
        self._rules = (*rules, default)
        quota = quota_of(sink.config, sink.context)
        self.gate = Gate(sink.context, [rule.when for rule in rules], quota)
        self._own: list[_Tapped] = []
        # The products that the job's own rules left out.
        self._left: list[_Tapped] = []
        # Removes the hooks from modules and functions.
        self._undo: list[Callable[[], None]] = []
        # The hooks that must run last before a forward.
        self._last: list[RemovableHandle] = []
        # Whether a forward has begun.
        self._settled = False
        emulation_label.follow(self._emulation_changed)

    @property
    def taps(self) -> list[Tap]:
        """Return the taps of the products that the job selected."""
        return [own.tap for own in self._own]

    def attach(self, site: Site, place: Place, wanted: Mapping[str, Wanted]) -> None:
        """Tap a product that the job selected."""
        _claim(self._tap(site, place, wanted, self._own))

    def leave_out(self, site: Site, place: Place) -> None:
        """Put hooks on a product that the job did not select. They trace nothing into graphs."""
        self._tap(site, place, {}, self._left)

    def settle(self) -> None:
        """Move the taps after all other hooks of their modules. It runs when a forward has begun.

        Other hooks may be newer and may change the operands. Tensor parallelism uses hooks on the modules, and so do
        parameters that are gathered for each forward. They may add a hook again during training. A tap that read the
        parameter before its gather would start the gather.
        """
        gate = self.gate
        if self._settled and (gate.closed_at == gate.context.iteration or not gate.admits()):
            return
        self._settled = True
        for handle in self._last:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)

    def steer(self, steer: Steer) -> int:
        """Capture as `capd ctl` orders from now on. Only the training thread may call it.

        Returns:
            The number of products that are captured.
        """
        selection = steer.selection or Selection()
        whens = [rule.when.changed(selection) for rule in self._rules]
        if selection.modules is None:
            del whens[-1]
        takes_part = self.gate.steer(whens if steer.capturing else [])
        chosen = []
        for tapped in self._own:
            wanted = selection.modules is None or matches_any(tapped.target.module, selection.modules)
            tapped.tap.select(self._steered(tapped, selection.tensors) if wanted else {})
            if wanted:
                chosen.append(tapped.target)
        for tapped in self._left:
            named = selection.modules is not None and matches_any(tapped.target.module, selection.modules)
            wanted = named and _claim(tapped)
            tapped.tap.select(self._steered(tapped, selection.tensors) if wanted else {})
            if wanted:
                chosen.append(tapped.target)
            else:
                _give_up(tapped)
        return len(run_together(chosen)) if takes_part else 0

    def _steered(self, tapped: _Tapped, tensors: Optional[Iterable[str]]) -> Mapping[str, Wanted]:
        """Return what a product captures with these tensors; None: the tensors of its own rules.

        A tensor that no rule names is captured as all rules of its product say.
        """
        default, kind = len(self._rules) - 1, tapped.tap.kind
        if tensors is None:
            if tapped.wanted:
                return tapped.wanted
            tensors = self._rules[default].tensors_of(tapped.target)
        rules = rules_of(tapped.wanted) or 1 << default
        kept = [(number, rule) for number, rule in enumerate(self._rules) if rules >> number & 1]
        return {
            name: tapped.wanted.get(name) or Wanted({number: rule.keeps(name) for number, rule in kept})
            for name in tensors
            if name in kind.tensors
        }

    def steps_of(self, key: Key) -> Optional[tuple[str, str]]:
        """Return the steps in which the job's own rules keep this key.

        Returns:
            Two texts, or None if the rules do not keep the key. First: the steps of rules that keep most of the tensor.
            Second: the steps of other rules, which want only its statistics; else "".
        """
        for own in self._own:
            # A quantised weight has further tensors, as in "weight.absmax".
            wanted = own.wanted.get(key.tensor_name.partition(".")[0])
            if own.target.module == key.module and own.tap.kind.component == key.component and wanted:
                kept = wanted.keeping or wanted.mask
                return self.gate.steps_of(kept), self.gate.steps_of(wanted.mask & ~kept)
        return None

    def remove(self) -> None:
        """Remove every hook."""
        for undo in self._undo:
            undo()
        for tapped in (*self._own, *self._left):
            tapped.tap.remove()
            _give_up(tapped)
        self._own, self._left, self._undo, self._last = [], [], [], []

    def _emulation_changed(self) -> None:
        for tapped in (*self._own, *self._left):
            tapped.tap.offers.forget_names()

    def _tap(self, site: Site, place: Place, wanted: Mapping[str, Wanted], taps: list[_Tapped]) -> _Tapped:
        module = site.module
        tap = Tap(site, place, wanted, self._sink, self.gate)
        tapped = _Tapped(tap, _product(site), target_of(site, place), wanted)
        # It comes before the hooks, so `remove` also cleans up after a failure half-way.
        taps.append(tapped)
        if site.function is None:
            before = module.register_forward_pre_hook(PreHook(tap, site), with_kwargs=True)
            self._undo.append(before.remove)
            self._last.append(before)
            after = module.register_forward_hook(ForwardHook(tap, site), with_kwargs=True, prepend=True)
            self._undo.append(after.remove)
        else:
            owner = owner_of(module)
            owner.add(site.role or site.function.role, tap)
            self._undo.append(partial(owner.discard, tap))
            site.function.install(tap.tensors)
            self._undo.append(site.function.uninstall)
        return tapped


def _claim(tapped: _Tapped) -> bool:
    """Claim a product for a tap. Return False if another watch captures it."""
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
