"""Statistics of any number of records together, the same to the bit in whatever order and grouping they were added.

`capd.store.statistics` says what they are. Counts and extremes merge exactly by nature; the sums of the records, each a
float64, are added as whole numbers (`capd.analyze.exact`) and rounded once, when they are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Optional

from capd.analyze.exact import exact, rounded
from capd.store.frames import Number, StatsRow
from capd.store.statistics import Stats, public

__all__ = ["StatsSum"]


class StatsSum:
    """Adds statistics. Takes some 2 KiB. Not thread-safe."""

    def __init__(self) -> None:
        self._count = self._nan = self._inf = self._zero = 0
        self._min: Optional[Number] = None
        self._max: Optional[Number] = None
        self._absmax: Optional[Number] = None
        self._sum, self._sum_sq = _Sum(), _Sum()
        self._exponents: Counter[int] = Counter()

    def add(self, stats: Stats) -> None:
        """Add those of one record, or of several."""
        self._add(stats.count, stats.nan, stats.inf, stats.zero, (stats.min, stats.max, stats.absmax))
        self._sum.add(stats.sum)
        self._sum_sq.add(stats.sum_sq)
        self._exponents.update(stats.exponent_histogram)

    def add_sum(self, other: StatsSum) -> None:
        """Add all that another one holds."""
        self._add(other._count, other._nan, other._inf, other._zero, (other._min, other._max, other._absmax))
        self._sum.add_sum(other._sum)
        self._sum_sq.add_sum(other._sum_sq)
        self._exponents.update(other._exponents)

    def _add(self, count: int, nan: int, inf: int, zero: int, ends: tuple[Optional[Number], ...]) -> None:
        self._count += count
        self._nan += nan
        self._inf += inf
        self._zero += zero
        self._min = _pick(min, self._min, ends[0])
        self._max = _pick(max, self._max, ends[1])
        self._absmax = _pick(max, self._absmax, ends[2])

    @property
    def stats(self) -> Stats:
        """Of all together; of nothing a count of 0 and no extremes."""
        exponents = [number for pair in sorted(self._exponents.items()) for number in pair]
        return public(
            StatsRow(
                self._count, self._nan, self._inf, self._zero, self._min, self._max, self._absmax,
                self._sum.value, self._sum_sq.value, exponents,
            )
        )  # fmt: skip


class _Sum:
    """Of float64; those beyond its range, Inf or NaN, are added as such."""

    def __init__(self) -> None:
        self._units, self._special = 0, 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._units += exact(value)
        else:
            self._special += value

    def add_sum(self, other: _Sum) -> None:
        self._units += other._units
        self._special += other._special

    @property
    def value(self) -> float:
        return rounded(self._units) + self._special


def _pick(
    choose: Callable[[Number, Number], Number], a: Optional[Number], b: Optional[Number]
) -> Optional[Number]:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)
