"""The figures of a store for the daemon's metrics: durations of its syncs and seals, and non-finite values by run."""

from __future__ import annotations

from dataclasses import dataclass, field

from capd.histogram import Histogram
from capd.store.format.frames import StatsRow

__all__ = ["Durations", "NonFinite"]


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations that all run stores of a daemon measure.

    Attributes:
        syncs: The group syncs before acknowledgements; empty in a buffered store.
        seals: The seals of one group of series each.
    """

    syncs: Histogram = field(default_factory=Histogram)
    seals: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class NonFinite:
    """The non-finite values in the committed records of one run since it was opened."""

    nan: int = 0
    inf: int = 0

    def add(self, stats: StatsRow | None) -> None:
        """Count the values of one record. None: it has no statistics."""
        if stats is not None:
            self.nan += stats.nan
            self.inf += stats.inf
