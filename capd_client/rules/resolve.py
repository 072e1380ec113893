"""Resolves rules for the modules of one model: which tensors are captured, when and how. No torch.

A capture is taken if at least one rule of its tensor admits its moment. Each rule of a model is a bit. The result for
a tensor is computed once per set of rules that are open together (`Wanted`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional, Union

from capd_client.protocol.selection import Ranges, Selection
from capd_client.rules.schema import RuleSettings, operation_of, texts
from capd_client.rules.slices import Slice, parse_slices

__all__ = [
    "Kept",
    "Resolved",
    "Rule",
    "Target",
    "Wanted",
    "When",
    "resolve",
    "restricting",
    "rules_of",
    "run_together",
]


class When(NamedTuple):
    """The moments of a rule. `micro_batches` and `ranks` are None for all."""

    steps: Ranges
    micro_batches: Optional[Ranges] = None
    ranks: Optional[Ranges] = None

    def on(self, rank: int) -> bool:
        """Whether the rule applies on this rank."""
        return self.ranks is None or rank in self.ranks

    def meets(self, other: When) -> bool:
        """Whether the two share a moment on some rank."""
        return self.steps.meets(other.steps) and all(
            one is None or two is None or one.meets(two)
            for one, two in ((self.micro_batches, other.micro_batches), (self.ranks, other.ranks))
        )

    def changed(self, given: Union[Selection, RuleSettings]) -> When:
        """Return the moments with each part replaced that a selection or a rule sets."""
        return When(
            self.steps if given.steps is None else Ranges(str(given.steps)),
            self.micro_batches if given.micro_batches is None else restricting(str(given.micro_batches)),
            self.ranks if given.ranks is None else restricting(str(given.ranks)),
        )

    def equals(self, other: When) -> bool:
        """Whether both are written alike."""
        return all((one and one.text) == (two and two.text) for one, two in zip(self, other, strict=True))


class Target(NamedTuple):
    """A product of a model, as rules see it.

    Attributes:
        module, layer, component: As in the product's keys.
        tensors: The names of all its tensors.
        default: The names of the tensors that are captured if a rule names none.
        instead_of: The modules, as in their keys, of products that this one replaces: either they run or this one.
    """

    module: str
    layer: Optional[int]
    component: str
    tensors: tuple[str, ...]
    default: frozenset[str]
    instead_of: tuple[str, ...] = ()


def run_together(targets: Sequence[Target]) -> list[Target]:
    """Return the products that one forward can run, without the alternatives of other products in the list."""
    modules = {target.module for target in targets}
    return [target for target in targets if modules.isdisjoint(target.instead_of)]


class Kept(NamedTuple):
    """The record of a tensor: the rows that are kept (None: all), and one of `capd_client.rules.schema.STORES`."""

    take: Optional[Slice]
    store: str


class Rule:
    """One rule, with the defaults of its model filled in.

    Args:
        settings: The rule as the user wrote it.
        when: The moments that apply if the rule names none.
        tensors: The names that apply if the rule names none; None is each product's default.
        slices: The slices by tensor name that apply if the rule has none.
        store: One of `capd_client.rules.schema.STORES`, which applies if the rule names none.
    """

    def __init__(
        self,
        settings: RuleSettings,
        when: When,
        *,
        tensors: Optional[frozenset[str]] = None,
        slices: Mapping[str, Slice] = {},
        store: str = "full",
    ) -> None:
        self.settings = settings
        self.name = settings.name or ""
        self.when = when.changed(settings)
        self.tensors = frozenset(texts(settings.tensors)) or tensors
        self.store = settings.store or store
        self.slices = slices if settings.slices is None else parse_slices(settings.slices)
        self.layers = None if settings.layers is None else Ranges(str(settings.layers))
        self._include = [re.compile(text) for text in texts(settings.include)]
        self._exclude = [re.compile(text) for text in texts(settings.exclude)]
        self._components = texts(settings.components)
        self._operations = texts(settings.operations)

    def leaves_out(self, target: Target) -> Optional[str]:
        """Return the first of include, exclude, components and layers that excludes the module; None if none does."""
        if self._include and not any(pattern.search(target.module) for pattern in self._include):
            return "include"
        if any(pattern.search(target.module) for pattern in self._exclude):
            return "exclude"
        if self._components and target.component not in self._components:
            return "components"
        if self.layers is not None and (target.layer is None or target.layer not in self.layers):
            return "layers"
        return None

    def tensors_of(self, target: Target) -> tuple[str, ...]:
        """Return the names of the module's tensors that the rule wants, in the module's order."""
        wanted = target.default if self.tensors is None else self.tensors
        return tuple(
            name
            for name in target.tensors
            if name in wanted and (not self._operations or operation_of(name) in self._operations)
        )

    def keeps(self, tensor: str) -> Kept:
        """Return how the rule records a tensor."""
        return Kept(self.slices.get(tensor), self.store)


def restricting(text: str) -> Optional[Ranges]:
    """Return the ranges; None if they cover all numbers."""
    return None if text.strip() == "all" else Ranges(text)


class Wanted:
    """The records of one tensor that all rules want, by sets of open rules.

    Attributes:
        mask: The bits of these rules.
        keeping: The bits of the rules that keep more than statistics.
    """

    __slots__ = ("_kept", "keeping", "mask")

    def __init__(self, kept: Mapping[int, Kept]) -> None:
        """Index the rules' records: `kept` is by number of the rule, ascending."""
        self._kept = dict(kept)
        self.mask = sum(1 << number for number in kept)
        self.keeping = sum(1 << number for number, one in kept.items() if one.store != "stats")

    def of(self, open_rules: int) -> Optional[Kept]:
        """Return the record while these rules are open; None if none of them wants the tensor.

        The slice is the one of the first open rule. The store covers every open rule's.
        """
        kept = [kept for number, kept in self._kept.items() if open_rules >> number & 1]
        if not kept:
            return None
        stores = {one.store for one in kept}
        return Kept(kept[0].take, stores.pop() if len(stores) == 1 else "both")


def rules_of(wanted: Mapping[str, Wanted]) -> int:
    """Return the bits of the rules that want any of these tensors."""
    found = 0
    for one in wanted.values():
        found |= one.mask
    return found


class Resolved(NamedTuple):
    """Rules, resolved for the modules of one model.

    Attributes:
        wanted: For each target, its captured tensors by name.
        chosen: For each rule, the numbers of its targets.
    """

    rules: tuple[Rule, ...]
    targets: tuple[Target, ...]
    wanted: tuple[dict[str, Wanted], ...]
    chosen: tuple[tuple[int, ...], ...]


def resolve(rules: Sequence[Rule], targets: Iterable[Target]) -> Resolved:
    """Resolve the rules: find the tensors of each target that each rule wants."""
    targets = tuple(targets)
    chosen: list[list[int]] = [[] for _ in rules]
    wanted: list[dict[str, Wanted]] = []
    for at, target in enumerate(targets):
        kept: dict[str, dict[int, Kept]] = {}
        for number, rule in enumerate(rules):
            names = () if rule.leaves_out(target) else rule.tensors_of(target)
            for name in names:
                kept.setdefault(name, {})[number] = rule.keeps(name)
            if names:
                chosen[number].append(at)
        wanted.append({name: Wanted(kept[name]) for name in target.tensors if name in kept})
    return Resolved(tuple(rules), targets, tuple(wanted), tuple(map(tuple, chosen)))
