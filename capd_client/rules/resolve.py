"""Which tensors of which modules are captured, when and how: rules, resolved for the modules of one model. No torch.

A capture is taken if one rule or more of its tensor admit its moment. Each of a model's rules is a bit; what the rules
of a tensor want of it is worked out once per set of rules that are open together (`Wanted`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional

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
    """The moments of a rule. micro_batches, ranks: None for all."""

    steps: Ranges
    micro_batches: Optional[Ranges] = None
    ranks: Optional[Ranges] = None

    def on(self, rank: int) -> bool:
        """Whether the rank is one of them."""
        return self.ranks is None or rank in self.ranks

    def meets(self, other: When) -> bool:
        """Whether some moment of some rank is in both."""
        return self.steps.meets(other.steps) and all(
            one is None or two is None or one.meets(two)
            for one, two in ((self.micro_batches, other.micro_batches), (self.ranks, other.ranks))
        )

    def steered(self, selection: Selection) -> When:
        """With what the selection says in the place of it."""
        return When(
            self.steps if selection.steps is None else Ranges(selection.steps),
            self.micro_batches if selection.micro_batches is None else restricting(selection.micro_batches),
            self.ranks if selection.ranks is None else restricting(selection.ranks),
        )

    def equals(self, other: When) -> bool:
        """Whether both are written alike."""
        return all((one and one.text) == (two and two.text) for one, two in zip(self, other, strict=True))


class Target(NamedTuple):
    """A product of a model, as rules see it.

    module, layer, component: as in its keys. tensors: all that it has. default: those captured unless others are named.
    instead_of: the modules, as in their keys, of products that run where this one does not.
    """

    module: str
    layer: Optional[int]
    component: str
    tensors: tuple[str, ...]
    default: frozenset[str]
    instead_of: tuple[str, ...] = ()


def run_together(targets: Sequence[Target]) -> list[Target]:
    """The products that one forward can run: without those that would run instead of others of them."""
    modules = {target.module for target in targets}
    return [target for target in targets if modules.isdisjoint(target.instead_of)]


class Kept(NamedTuple):
    """How a tensor is recorded: the rows that are kept (None: all), and one of `rule_settings.STORES`."""

    take: Optional[Slice]
    store: str


class Rule:
    """One rule with the defaults of its model filled in.

    tensors: the names that it gives or that `watch` was given, None: those of the product. store: of a rule that names
    none. slices: of one that names none.
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
        self.when = When(
            when.steps if settings.steps is None else Ranges(str(settings.steps)),
            when.micro_batches
            if settings.micro_batches is None
            else restricting(str(settings.micro_batches)),
            when.ranks if settings.ranks is None else restricting(str(settings.ranks)),
        )
        self.tensors = frozenset(texts(settings.tensors)) or tensors
        self.store = settings.store or store
        self.slices = slices if settings.slices is None else parse_slices(settings.slices)
        self.layers = None if settings.layers is None else Ranges(str(settings.layers))
        self._include = [re.compile(text) for text in texts(settings.include)]
        self._exclude = [re.compile(text) for text in texts(settings.exclude)]
        self._components = texts(settings.components)
        self._operations = texts(settings.operations)

    def leaves_out(self, target: Target) -> Optional[str]:
        """The first of include, exclude, components and layers that leaves the module out; None if none does."""
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
        """The tensors of the module that the rule wants, in the order in which the module has them."""
        wanted = target.default if self.tensors is None else self.tensors
        return tuple(
            name
            for name in target.tensors
            if name in wanted and (not self._operations or operation_of(name) in self._operations)
        )

    def keeps(self, tensor: str) -> Kept:
        """How it records a tensor."""
        return Kept(self.slices.get(tensor), self.store)


def restricting(text: str) -> Optional[Ranges]:
    """The ranges; None where they are all numbers."""
    return None if text.strip() == "all" else Ranges(text)


class Wanted:
    """What the rules of one tensor want of it. mask: their bits. keeping: of those that keep more than statistics."""

    __slots__ = ("_kept", "keeping", "mask")

    def __init__(self, kept: Mapping[int, Kept]) -> None:
        """kept: by the number of the rule, ascending."""
        self._kept = dict(kept)
        self.mask = sum(1 << number for number in kept)
        self.keeping = sum(1 << number for number, one in kept.items() if one.store != "stats")

    def of(self, open_rules: int) -> Optional[Kept]:
        """What is kept while these rules are open; None: nothing.

        The slice is that of the first of them; what one of them keeps is kept.
        """
        kept = [kept for number, kept in self._kept.items() if open_rules >> number & 1]
        if not kept:
            return None
        stores = {one.store for one in kept}
        return Kept(kept[0].take, stores.pop() if len(stores) == 1 else "both")


def rules_of(wanted: Mapping[str, Wanted]) -> int:
    """The rules that want any of these tensors, as bits."""
    found = 0
    for one in wanted.values():
        found |= one.mask
    return found


class Resolved(NamedTuple):
    """Rules and the modules of a model brought together.

    wanted: for each target, its captured tensors by name. chosen: for each rule, the numbers of its targets.
    """

    rules: tuple[Rule, ...]
    targets: tuple[Target, ...]
    wanted: tuple[dict[str, Wanted], ...]
    chosen: tuple[tuple[int, ...], ...]


def resolve(rules: Sequence[Rule], targets: Iterable[Target]) -> Resolved:
    """Which rules want which tensors of each target."""
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
