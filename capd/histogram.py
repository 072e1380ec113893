"""A histogram of durations with fixed bounds, for figures that one thread measures and others read."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["BOUNDS_S", "Histogram"]

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The upper bounds of the buckets in seconds. A last bucket without a bound holds what took longer."""


class Histogram:
    """Counts durations by bucket. One thread adds; any thread may read at the same time without a lock."""

    __slots__ = ("_counts", "_total_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration in seconds."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def read(self) -> tuple[list[int], float]:
        """Return the count of each bucket, the last without a bound, and the sum of all durations in seconds.

        A duration that is added at this moment may be in one of the two results only.
        """
        return list(self._counts), self._total_s
