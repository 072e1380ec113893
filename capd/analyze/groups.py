"""Groups of records: what has one value of a field, or one value of each of several, merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Union

from capd.analyze.distribution import Distribution
from capd.store.statistics import Stats, merge_stats

__all__ = [
    "FIELDS",
    "KEY_FIELDS",
    "MOMENT_FIELDS",
    "STATISTICS",
    "Fields",
    "Groups",
    "Tally",
    "Value",
    "in_order",
]

KEY_FIELDS = ("quant_type", "rank", "layer", "layer_type", "phase", "operation", "component", "tensor_name")
MOMENT_FIELDS = ("sample_idx", "iteration")
FIELDS = (
    "quant_type", "rank", "sample_idx", "iteration", "layer", "layer_type", "phase", "operation", "component",
    "tensor_name",
)  # fmt: skip
STATISTICS = ("count", "nan", "inf", "zero", "min", "max", "absmax", "mean", "std")

Value = Union[str, int, None]
Fields = tuple[str, ...]
_TOGETHER = 32


class Tally:
    """What some records come to. raw_bytes: of what is kept of them; distribution: of the elements of those that were
    read, None where none was."""

    def __init__(
        self,
        records: int = 0,
        raw_bytes: int = 0,
        stats: Stats | None = None,
        distribution: Distribution | None = None,
    ) -> None:
        self.records, self.raw_bytes, self.distribution = records, raw_bytes, distribution
        self._stats = [] if stats is None else [stats]

    @property
    def stats(self) -> Stats:
        """Statistics of all their elements."""
        if len(self._stats) != 1:
            self._stats = [merge_stats(self._stats)]
        return self._stats[0]

    def add(self, other: Tally, *, values: bool = True) -> None:
        """Add the records of another one. values: their distribution, too."""
        self.records += other.records
        self.raw_bytes += other.raw_bytes
        self._stats.append(other.stats)
        if len(self._stats) > _TOGETHER:  # several in one go cost half of one by one
            self._stats = [merge_stats(self._stats)]
        if values and other.distribution is not None:
            self.distribution = self.distribution or Distribution()
            self.distribution.add(other.distribution)


class Groups:
    """Tallies by one or several fields. groupings: the fields of each, and whether it keeps distributions."""

    def __init__(self, groupings: Mapping[Fields, bool]) -> None:
        self._groupings = groupings
        self._tallies: dict[Fields, dict[tuple[Value, ...], Tally]] = {fields: {} for fields in groupings}

    @property
    def groupings(self) -> Iterable[Fields]:
        """All of them."""
        return self._groupings

    def add(self, grouping: Fields, values: Sequence[Value], tally: Tally) -> None:
        """Add records that have these values of the grouping's fields."""
        held = self._tallies[grouping].setdefault(tuple(values), Tally())
        held.add(tally, values=self._groupings[grouping])

    def by(self, *grouping: str) -> dict[tuple[Value, ...], Tally]:
        """The groups of a grouping by their values, in order, None before all else."""
        found = self._tallies[grouping]
        return {values: found[values] for values in sorted(found, key=_order)}

    def whole(self) -> Tally:
        """All records."""
        return self._tallies[()].get((), Tally())

    def values(self, grouping: Fields, name: str) -> list[Value]:
        """The values of one field of a grouping, in order."""
        place = grouping.index(name)
        return in_order({values[place] for values in self._tallies[grouping]})


def in_order(values: Iterable[Value]) -> list[Value]:
    """Values of one field, ascending, None before all else."""
    return [value for (value,) in sorted(((value,) for value in values), key=_order)]


def _order(values: tuple[Value, ...]) -> list[tuple[bool, Value]]:
    return [(value is not None, 0 if value is None else value) for value in values]
