"""The summary of each series for its page: a few KiB, for any number of records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from capd.analyze.channels import Channels
from capd.analyze.groups import Tally
from capd.io.items import Loaded
from capd.report.binades import binades
from capd.report.measured import Measured
from capd.report.quantiles import quantiles_of
from capd_client.protocol.key import Key, Moment

__all__ = ["MOST_SERIES", "Outlier", "Point", "SeriesSummaries", "SeriesSummary", "emulation_of"]

MOST_SERIES = 1000
"""The number of series that have a page. Further series are only in the groups."""
_MOST_POINTS = 128


@dataclass(frozen=True, slots=True)
class Point:
    """One record of a series: its moment, its statistics and its shares by exponent (`binades`)."""

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
    _closed: bool = False

    def add(self, measured: Measured) -> None:
        """Add a record."""
        if self.tally.records % self.step == 0:
            stats = measured.tally.stats
            shares = binades(stats.exponent_histogram)
            self.points.append(Point(measured.loaded.moment, stats.mean, stats.std, stats.absmax, shares))
            if len(self.points) > _MOST_POINTS:
                self.points, self.step = self.points[::2], 2 * self.step
        self.tally.add(measured.tally, values=not self._closed, channels=not self._closed)
        self.emulation = emulation_of(measured.loaded) or self.emulation

    def close(self) -> None:
        """Close a run of neighbours: keep the quantiles and the outlier alone, or none of them after a second run."""
        found = [] if self._closed else list(self.tally.channels.values())
        self.quantiles = None if self._closed else quantiles_of(self.tally)
        self.outlier = Outlier.of(found[0]) if len(found) == 1 else None
        self.tally.distribution, self.tally.channels, self._closed = None, {}, True


class SeriesSummaries:
    """The summaries of the first MOST_SERIES series, and the number of further ones."""

    def __init__(self) -> None:
        self._found: dict[tuple[Key, str], SeriesSummary] = {}
        self._others: set[tuple[Key, str]] = set()
        self._last: SeriesSummary | None = None

    def add(self, name: str, measured: Measured) -> None:
        """Add a record. `name` is the name of its item."""
        loaded = measured.loaded
        identity = loaded.key, loaded.dtype
        summary = self._found.get(identity)
        if summary is None:
            if len(self._found) >= MOST_SERIES:
                self._others.add(identity)
                return
            path = name.rpartition("#")[0] or name
            summary = self._found[identity] = SeriesSummary(path, loaded.key, loaded.dtype, loaded.shape)
        if summary is not self._last:
            self.close()
            self._last = summary
        summary.add(measured)

    def close(self) -> None:
        """Close the series of the last record, because no more of its records follow."""
        if self._last is not None:
            self._last.close()
            self._last = None

    def __iter__(self) -> Iterator[SeriesSummary]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found) + len(self._others)


def emulation_of(loaded: Loaded) -> str | None:
    """Return the emulation that a record names as active when it was captured, None if it names none."""
    found = loaded.attributes.get("emulation")
    return found if isinstance(found, str) else None
