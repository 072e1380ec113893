"""The memory of one rule about one series: records in a row, the last magnitude, and the baseline."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from statistics import median

from capd.rules.schema import BaselineSettings

__all__ = ["Baseline", "WatchedSeries"]


class Baseline:
    """The largest values of the last iterations without an alert, and their median."""

    __slots__ = ("_at", "_median", "_pending", "_room", "_values")

    def __init__(self, iterations: int) -> None:
        """Begin without values. At most `iterations` are kept."""
        self._room, self._at = iterations, 0
        self._values = array("d")
        self._median: float | None = None
        # The iteration in work, and its largest value.
        self._pending: tuple[int, float] | None = None

    def __len__(self) -> int:
        return len(self._values)

    def take(self, iteration: int, value: float) -> None:
        """Take a finite value of an iteration, after `settle`."""
        largest = value if self._pending is None else max(self._pending[1], value)
        self._pending = (iteration, largest)

    def settle(self, iteration: int, is_clean: Callable[[int], bool]) -> None:
        """Let the earlier iteration enter, if `is_clean` says so, before a value of `iteration` is compared."""
        if self._pending is not None and self._pending[0] != iteration:
            before, largest = self._pending
            self._pending = None
            if is_clean(before):
                self._add(largest)

    def median(self) -> float | None:
        """Return the median; None without values."""
        if self._median is None and self._values:
            self._median = median(self._values)
        return self._median

    def _add(self, value: float) -> None:
        if len(self._values) < self._room:
            self._values.append(value)
        else:
            self._values[self._at] = value
            self._at = (self._at + 1) % self._room
        self._median = None


class WatchedSeries:
    """The state of one rule and series, for one attempt of the job: an earlier one may have diverged."""

    __slots__ = ("attempt", "baseline", "in_a_row", "last_absmax")

    def __init__(self, attempt: int, baseline: BaselineSettings | None) -> None:
        """Begin with a series' first record of an attempt."""
        self.attempt = attempt
        self.in_a_row = 0
        self.last_absmax: float | None = None
        self.baseline = None if baseline is None else Baseline(baseline.iterations)
