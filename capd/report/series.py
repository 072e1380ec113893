"""The summary of each series for its page: a few KiB, for any number of records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from capd.analyze.channels import Channels
from capd.analyze.groups import Tally
from capd.io.items import Item, Loaded
from capd.report.binades import binades
from capd.report.measured import Measured
from capd.report.quantiles import quantiles_of
from capd_client.protocol.key import Key, Moment

__all__ = ["MOST_SERIES", "Outlier", "Point", "SeriesSummaries", "SeriesSummary", "emulation_of"]

MOST_SERIES = 1000
"""The number of series that have a page. Further series are only in the groups."""
_MOST_POINTS = 128

SeriesIdentity = tuple[Key, str]


@dataclass(frozen=True, slots=True)
class Point:
    """One record of a series: its statistics and its shares by exponent (`binades`).

    Attributes:
        place: The number of the records of the series before it.
    """

    place: int
    moment: Moment
    mean: float | None
    std: float | None
    absmax: float | None
    shares: array[int]


@dataclass(frozen=True, slots=True)
class Outlier:
    """The channels of a series in short: their number, and how far the largest one sticks out.

    Attributes:
        ratio: The amax of the largest channel over that of the median one, None if the median is 0.
        percent: The share of values beyond 6 σ.
        channel: The first index of the largest entry.
        amax: Its largest magnitude.
    """

    channels: int
    ratio: float | None
    percent: float
    channel: int
    amax: float

    @classmethod
    def of(cls, channels: Channels) -> Outlier:
        """Return the facts of some channels."""
        [(channel, amax, _)] = channels.largest(1)
        return cls(channels.channels, channels.amax_ratio, channels.outlier_percent, channel, amax)


@dataclass(slots=True)
class SeriesSummary:
    """The summary of the records of one key and dtype.

    Attributes:
        path: The path of the series below its run, or of its first file.
        shape: The shape of its first record.
        emulation: The emulation that its last record names, None if it names none.
        tally: The tally of the records, without a distribution.
        outlier: Its channels in short, None if they were not measured, differ in number, or came apart as quantiles do.
        quantiles: The values at QUANTILES, as exact as the distribution. None if no element was read, or if the
            records were not neighbours, as in a directory of files.
        points: Every `step`-th record, at most 128.
    """

    path: str
    key: Key
    dtype: str
    shape: tuple[int, ...]
    emulation: str | None = None
    tally: Tally = field(default_factory=Tally)
    outlier: Outlier | None = None
    quantiles: list[float] | None = None
    points: list[Point] = field(default_factory=list)
    step: int = 1
    # Whether the tally still has the distribution and the channels.
    _open: bool = True

    def add(self, measured: Measured, place: int) -> None:
        """Add the record with this place in the series."""
        if place % self.step == 0:
            stats = measured.tally.stats
            shares = binades(stats.exponent_histogram)
            self.points.append(
                Point(place, measured.loaded.moment, stats.mean, stats.std, stats.absmax, shares)
            )
            self._thin(self.step)
        self.tally.add(measured.tally, values=self._open, channels=self._open)
        self.emulation = emulation_of(measured.loaded) or self.emulation

    def extend(self, other: SeriesSummary) -> None:
        """Add later records, which are neighbours of these if both summaries are open."""
        if not other._open:
            self.part()
        self.tally.add(other.tally, values=self._open, channels=self._open)
        step = max(self.step, other.step)
        self.points = [point for point in (*self.points, *other.points) if point.place % step == 0]
        self._thin(step)
        self.emulation = other.emulation or self.emulation

    def _thin(self, step: int) -> None:
        """Keep the points at multiples of a step, or of the next power of two that leaves at most 128."""
        self.step = step
        while len(self.points) > _MOST_POINTS:
            self.step *= 2
            self.points = [point for point in self.points if point.place % self.step == 0]

    def close(self) -> None:
        """Close a run of neighbours: keep the quantiles and the outlier alone."""
        if self._open:
            found = list(self.tally.channels.values())
            quantiles, outlier = quantiles_of(self.tally), Outlier.of(found[0]) if len(found) == 1 else None
            self.part()
            self.quantiles, self.outlier = quantiles, outlier

    def part(self) -> None:
        """Keep neither quantiles nor an outlier, as the records are no neighbours."""
        self.quantiles = self.outlier = self.tally.distribution = None
        self.tally.channels, self._open = {}, False


class SeriesSummaries:
    """The summaries of the first MOST_SERIES series, and the number of further ones.

    The summaries of the first and the last record stay open until the end, as neighbours may be added on both sides.
    """

    _found: dict[SeriesIdentity, SeriesSummary]
    _others: set[SeriesIdentity]
    _first: SeriesIdentity | None
    _last: SeriesIdentity | None

    def __init__(self) -> None:
        self._found, self._others = {}, set()
        self._first = self._last = None

    def add(self, item: Item, measured: Measured) -> None:
        """Add the record of an item."""
        loaded = measured.loaded
        identity = loaded.key, loaded.dtype
        summary, number = self._found.get(identity), len(self._found)
        if summary is None:
            if (number if item.place is None else item.place.series) >= MOST_SERIES:
                self._others.add(identity)
                return
            path = item.name.rpartition("#")[0] or item.name
            summary = self._found[identity] = SeriesSummary(path, loaded.key, loaded.dtype, loaded.shape)
        if identity != self._last:
            if number == len(self._found):
                summary.part()
            self._follow(identity, identity)
        summary.add(measured, summary.tally.records if item.place is None else item.place.record)

    def extend(self, other: SeriesSummaries) -> None:
        """Add the series of later records."""
        self._others |= other._others
        if other._first is None or other._last is None:
            return
        for identity, summary in other._found.items():
            own = self._found.setdefault(identity, summary)
            if own is not summary:
                if (self._last, identity) != (identity, other._first):
                    own.part()
                own.extend(summary)
        self._follow(other._first, other._last)

    def _follow(self, first: SeriesIdentity, last: SeriesIdentity) -> None:
        """Note that records follow whose first and last series are these. Close those that have no more neighbours."""
        ends = self._first or first, last
        for identity in {self._last, first} - {None, *ends}:
            self._found[identity].close()  # type: ignore[index]  # None is left out
        self._first, self._last = ends

    def close(self) -> None:
        """Close all series, because no more records follow."""
        for identity in (self._first, self._last):
            if identity is not None:
                self._found[identity].close()

    def __iter__(self) -> Iterator[SeriesSummary]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found) + len(self._others)


def emulation_of(loaded: Loaded) -> str | None:
    """Return the emulation that a record names as active when it was captured, None if it names none."""
    found = loaded.attributes.get("emulation")
    return found if isinstance(found, str) else None
