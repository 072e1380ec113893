"""The sums of replayed products by recipe and product, in groups of calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from capd.errors import ConfigError
from capd.products.captured.calls import Value
from capd.replay.sums import ProductSums

__all__ = ["BY_LAYER", "FIELDS", "ByRecipe", "ReplayGroups", "checked_fields"]

FIELDS = ("quant_type", "rank", "stack", "layer", "module", "iteration", "micro_batch", "call")
"""The fields of a call, by which calls may be grouped."""
BY_LAYER = ("quant_type", "layer")
"""The grouping of the figures."""
_MOST_GROUPS = 20_000

Place = tuple[Value, ...]
"""The values of some fields, in order."""
ByRecipe = Mapping[str, Mapping[str, ProductSums]]
"""Sums by the recipe's name and the product's."""


@dataclass(slots=True)
class ReplayGroups:
    """Sums by the fields of several groupings.

    Attributes:
        groupings: The fields of each grouping, () for all calls together.
    """

    groupings: Sequence[tuple[str, ...]]
    _groups: dict[tuple[str, ...], dict[Place, dict[str, dict[str, ProductSums]]]] = field(
        default_factory=dict
    )

    def add(self, place: Mapping[str, Value], found: ByRecipe) -> None:
        """Add the sums of one call.

        Raises:
            ConfigError: A grouping has too many groups.
        """
        for fields in dict.fromkeys(self.groupings):
            groups = self._groups.setdefault(fields, {})
            group = groups.setdefault(tuple(place[name] for name in fields), {})
            if len(groups) > _MOST_GROUPS:
                raise ConfigError(
                    f"--by {','.join(fields)} makes more than {_MOST_GROUPS:,} groups; name fewer fields, or select "
                    "fewer calls"
                )
            for recipe, products in found.items():
                for product, sums in products.items():
                    group.setdefault(recipe, {}).setdefault(product, ProductSums()).add(sums)

    def by(self, fields: tuple[str, ...]) -> dict[Place, ByRecipe]:
        """Return the groups of a grouping in order of their values; None is last."""
        found = self._groups.get(fields, {})
        return {place: found[place] for place in sorted(found, key=_order)}

    def whole(self) -> ByRecipe:
        """Return the sums of all calls."""
        return self.by(()).get((), {})


def checked_fields(text: str) -> tuple[str, ...]:
    """Return the fields that --by names, each once, none for "none". Raises ConfigError for an unknown field."""
    if text.strip() == "none":
        return ()
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in FIELDS:
            raise ConfigError(f"--by: {name!r} is no field of a call; use {', '.join(FIELDS)}, or none")
    return names


def _order(place: Iterable[Value]) -> list[tuple[bool, bool, int, str]]:
    return [
        (one is None, isinstance(one, str), one if isinstance(one, int) else 0, str(one)) for one in place
    ]
