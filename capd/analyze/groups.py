"""Groups of records: the merged records that share the value of a field, or the values of several fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from capd.analyze.block_ranges import BlockRanges
from capd.analyze.channels import Channels
from capd.analyze.distribution import Distribution
from capd.analyze.error_sums import Errors
from capd.analyze.exact import StatsSum
from capd.errors import ConfigError
from capd.store.format.statistics import Stats
from capd_client.protocol.key import Key, Moment

__all__ = [
    "FIELDS",
    "GROUP_FIELDS",
    "KEY_FIELDS",
    "MOMENT_FIELDS",
    "STATISTICS",
    "Fields",
    "Groups",
    "Tally",
    "Value",
    "checked_fields",
    "in_order",
    "order_of",
]

KEY_FIELDS = ("quant_type", "rank", "layer", "layer_type", "phase", "operation", "component", "tensor_name")
MOMENT_FIELDS = ("sample_idx", "iteration")
FIELDS = (
    "quant_type", "rank", "sample_idx", "iteration", "layer", "layer_type", "phase", "operation", "component",
    "tensor_name",
)  # fmt: skip
GROUP_FIELDS = (*Key.__struct_fields__, *Moment.__struct_fields__[:-2])
"""The fields by which records may be grouped: all but the time and the recomputation."""
STATISTICS = ("count", "nan", "inf", "zero", "min", "max", "absmax", "mean", "std")

Value = Union[str, int, None]
Fields = tuple[str, ...]
_MOST_WIDTHS = 4


class Tally:
    """The tally of some records. Errors, channels and ranges exist only if they were requested.

    Attributes:
        raw_bytes: The kept bytes of the records.
        distribution: The elements of the records that were read, None if none was read.
        errors: The errors of each format, by its label.
        channels: The channels, for each of the four smallest numbers of channels. So they are the same in whatever
            order records were added.
        other_channels: The number of records with further numbers of channels.
        ranges: The ranges of blocks, by the block's size (`capd.analyze.block_ranges`).
    """

    records: int
    raw_bytes: int
    distribution: Distribution | None
    errors: dict[str, Errors]
    channels: dict[int, Channels]
    other_channels: int
    ranges: dict[str, BlockRanges]
    _sum: StatsSum

    def __init__(
        self,
        records: int = 0,
        raw_bytes: int = 0,
        stats: Stats | None = None,
        distribution: Distribution | None = None,
        errors: Mapping[str, Errors] | None = None,
        channels: Channels | None = None,
        ranges: Mapping[str, BlockRanges] | None = None,
    ) -> None:
        self.records, self.raw_bytes, self.distribution = records, raw_bytes, distribution
        self._sum, self._stats = StatsSum(), stats
        if stats is not None:
            self._sum.add(stats)
        self.errors = dict(errors or {})
        self.channels = {} if channels is None else {channels.channels: channels}
        self.other_channels = 0
        self.ranges = dict(ranges or {})

    @property
    def stats(self) -> Stats:
        """The statistics of all elements, the same to the bit in whatever order records were added."""
        if self._stats is None:
            self._stats = self._sum.stats
        return self._stats

    def numbers(self) -> dict[str, Any]:
        """Return `records`, `raw_bytes` and STATISTICS as plain values."""
        statistics = {name: getattr(self.stats, name) for name in STATISTICS}
        return {"records": self.records, "raw_bytes": self.raw_bytes, **statistics}

    def add(self, other: Tally, *, values: bool = True, coarse: bool = False, channels: bool = True) -> None:
        """Add the records of another tally.

        Args:
            other: The other tally.
            values: Whether to add its distribution.
            coarse: Whether to add it in few patterns (`Distribution.coarse`).
            channels: Whether to add its channels.
        """
        self.records += other.records
        self.raw_bytes += other.raw_bytes
        self._stats = None
        self._sum.add_sum(other._sum)
        if values and other.distribution is not None:
            self.distribution = self.distribution or Distribution()
            self.distribution.add(other.distribution.coarse() if coarse else other.distribution)
        for label, errors in other.errors.items():
            self.errors.setdefault(label, Errors()).add(errors)
        for size, ranges in other.ranges.items():
            self.ranges.setdefault(size, BlockRanges()).add(ranges)
        if channels:
            self._add_channels(other)

    def _add_channels(self, other: Tally) -> None:
        self.other_channels += other.other_channels
        for number, channels in other.channels.items():
            if number in self.channels:
                self.channels[number].add(channels)
            else:
                self.channels[number] = replace(channels)
        for number in sorted(self.channels)[_MOST_WIDTHS:]:
            self.other_channels += self.channels.pop(number).records


@dataclass(slots=True)
class Groups:
    """Tallies by one field or by several.

    Attributes:
        groupings: The fields of each grouping, and whether it keeps distributions.
        channels: The groupings that keep channels, if channels are requested.
        coarse: The groupings that keep coarse distributions.
    """

    groupings: dict[Fields, bool]
    channels: Collection[Fields] = ()
    coarse: Collection[Fields] = ()
    _tallies: dict[Fields, dict[tuple[Value, ...], Tally]] = field(init=False)

    def __post_init__(self) -> None:
        self._tallies = {fields: {} for fields in self.groupings}

    def add(self, grouping: Fields, values: Sequence[Value], tally: Tally) -> None:
        """Add records that have these values of the grouping's fields."""
        held = self._tallies[grouping].setdefault(tuple(values), Tally())
        held.add(
            tally,
            values=self.groupings[grouping],
            coarse=grouping in self.coarse,
            channels=grouping in self.channels,
        )

    def extend(self, other: Groups) -> None:
        """Add the groups of other records, which have the same groupings."""
        for grouping, tallies in other._tallies.items():
            for values, tally in tallies.items():
                self.add(grouping, values, tally)

    def by(self, *grouping: str, **only: Value) -> dict[tuple[Value, ...], Tally]:
        """Return the groups of a grouping by their values, in order, None first.

        Args:
            grouping: The fields of the grouping.
            only: Fields of the grouping and the value that they must have. The keys of the result leave them out.
        """
        found = {}
        for values, tally in self._tallies[grouping].items():
            named = dict(zip(grouping, values, strict=True))
            if only.items() <= named.items():
                found[tuple(value for name, value in named.items() if name not in only)] = tally
        return dict(sorted(found.items(), key=lambda group: order_of(group[0])))

    def whole(self) -> Tally:
        """All records."""
        return self._tallies[()].get((), Tally())

    def values(self, name: str) -> list[Value]:
        """Return the values of a field that is a grouping of its own, in order."""
        return in_order({value for (value,) in self._tallies[name,]})


def checked_fields(what: str, names: Iterable[str]) -> Fields:
    """Return the names of fields, each once. `what` names them in the message.

    Raises:
        ConfigError: A name is not one of GROUP_FIELDS.
    """
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in GROUP_FIELDS:
            raise ConfigError(f"{what} {name!r} is no field; use some of {', '.join(GROUP_FIELDS)}")
    return found


def in_order(values: Iterable[Value]) -> list[Value]:
    """Return the values of one field, ascending, None first."""
    return [value for (value,) in sorted(((value,) for value in values), key=order_of)]


def order_of(values: tuple[Value, ...]) -> list[tuple[bool, Value]]:
    """Return the sorting key of a group: its values, ascending, None first."""
    return [(value is not None, 0 if value is None else value) for value in values]
