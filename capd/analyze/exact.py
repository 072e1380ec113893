"""Sums of float64 without rounding, and statistics that use them.

A sum is a whole number of units. The unit is so small that every float64 is a multiple of it. The addition of whole
numbers is associative and commutative. So a sum is the same to the bit for every grouping and order of its terms. Only
`rounded` and `quotient` round, once, to nearest. A sum takes some 300 bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import numpy as np
from numpy.typing import NDArray

from capd.store.format.frames import Number, StatsRow
from capd.store.format.statistics import Stats, public

__all__ = ["RatioSpread", "ShortSum", "StatsSum", "exact", "quotient", "rounded", "weighted"]

# The number of mantissa bits of a float64.
_DIGITS = 53
# The unit is 2**-_SHIFT.
_SHIFT = 1074 + _DIGITS
_ONE = 1 << _SHIFT
# All but the 27 low bits of a float64.
_HIGH_HALF = -1 << 27
# Counts and magnitudes below these stay exact and finite in every step of a sum.
_MOST = 1 << 26
_LARGE = 2.0**900


def exact(value: float) -> int:
    """Convert a finite float64 to units."""
    mantissa, exponent = math.frexp(value)
    return int(math.ldexp(mantissa, _DIGITS)) << (exponent - _DIGITS + _SHIFT)


def weighted(values: NDArray[np.float64], counts: NDArray[np.int64]) -> int:
    """Return the sum of finite values times their counts, in units. Counts must not be negative."""
    if not values.size:
        return 0
    if int(counts.max()) >= _MOST or float(np.abs(values).max()) >= _LARGE:
        pairs = zip(values.tolist(), counts.tolist(), strict=True)
        return sum(exact(value) * count for value, count in pairs)
    # Half a mantissa times a count is exact in float64.
    high = (values.view(np.int64) & _HIGH_HALF).view(np.float64)
    low = values - high
    return _total(high * counts) + (_total(low * counts) if low.any() else 0)


def _total(terms: NDArray[np.float64]) -> int:
    """Return the sum of float64, in units.

    Adding a much larger number to each term rounds all of them to a common step. Their sum is exact then, whatever its
    order, and so are the remainders, which are added next. Source: Demmel and Nguyen, Fast Reproducible
    Floating-Point Summation, ARITH 2013.
    """
    total, room = 0, terms.size.bit_length()
    while largest := max(float(terms.max()), -float(terms.min())):
        larger = 1.5 * 2.0 ** (math.frexp(largest)[1] + room)
        steps = (terms + larger) - larger
        total += exact(float(steps.sum()))
        terms = terms - steps
    return total


def rounded(total: int) -> float:
    """Return a sum as the nearest float64, Inf beyond its range."""
    return quotient(total, _ONE) or 0.0


def quotient(a: float, b: float) -> float | None:
    """Return a / b as the nearest float64, Inf beyond its range. None if b is 0."""
    if b == 0:
        return None
    try:
        return a / b
    except OverflowError:
        return math.inf if (a > 0) == (b > 0) else -math.inf


@dataclass(slots=True)
class ShortSum:
    """A sum of float64 without rounding, in as few bits as its terms need: some 150 bytes.

    Inf and NaN are added as such. `add` and `extend` are exactly associative and commutative.

    Attributes:
        mantissa, exponent: The sum of the finite terms is mantissa * 2**exponent. The mantissa is odd, or both are 0.
        special: The sum of the other terms.
    """

    mantissa: int = 0
    exponent: int = 0
    special: float = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        if not math.isfinite(value):
            self.special += value
            return
        share, exponent = math.frexp(value)
        self._add(int(math.ldexp(share, _DIGITS)), exponent - _DIGITS)

    def extend(self, other: ShortSum) -> None:
        """Add the terms of another sum."""
        self.special += other.special
        self._add(other.mantissa, other.exponent)

    def _add(self, mantissa: int, exponent: int) -> None:
        least = min(self.exponent, exponent)
        total = (self.mantissa << self.exponent - least) + (mantissa << exponent - least)
        zeros = (total & -total).bit_length() - 1 if total else 0
        self.mantissa, self.exponent = total >> zeros, least + zeros if total else 0

    @property
    def value(self) -> float:
        """The sum as the nearest float64, Inf beyond its range."""
        up, down = max(0, self.exponent), max(0, -self.exponent)
        return (quotient(self.mantissa << up, 1 << down) or 0.0) + self.special


@dataclass(slots=True)
class RatioSpread:
    """The spread of a ratio of two sums, Σb / Σa, over records: sums of the squares and products of a and b.

    Each record's a and b are rounded to float64 before. `add` is exactly associative and commutative.
    """

    records: int = 0
    aa: int = 0
    ab: int = 0
    bb: int = 0

    @classmethod
    def of_record(cls, a: int, b: int) -> RatioSpread:
        """Return the spread of one record with these sums, in units."""
        x, y = rounded(a), rounded(b)
        return cls(1, exact(x * x), exact(x * y), exact(y * y))

    def add(self, other: RatioSpread) -> None:
        """Add other records."""
        self.records += other.records
        self.aa += other.aa
        self.ab += other.ab
        self.bb += other.bb

    def relative_error(self, a: int, b: int) -> float | None:
        """Return the standard error of b / a as a share of it, None with fewer than two records or if a or b is 0.

        a and b are the sums of all records, in units. The records count as a random sample of very many. Source:
        Cochran, Sampling Techniques, 3rd ed., section 2.11 (the ratio estimator).
        """
        if self.records < 2 or not a or not b:
            return None
        # Σ(b_i - r a_i)² with r = b / a, times a².
        squares = self.bb * a * a - 2 * self.ab * a * b + self.aa * b * b
        # Both sides have the same units.
        share = quotient(max(0, squares) << _SHIFT, a * a * b * b) or 0.0
        return math.sqrt(share * self.records / (self.records - 1))


class StatsSum:
    """The statistics of any number of records together (`capd.store.format.statistics` defines them). Not thread-safe.

    The result is the same to the bit for every order and grouping of the records. Counts and extremes merge exactly,
    and sums are rounded once, when they are read. It takes some 2 KiB.
    """

    _count: int
    _nan: int
    _inf: int
    _zero: int
    _min: Optional[Number]
    _max: Optional[Number]
    _absmax: Optional[Number]
    _sum: _Sum
    _sum_sq: _Sum
    _sum_cube: _Sum
    _sum_fourth: _Sum
    _exponents: Counter[int]

    def __init__(self) -> None:
        self._count = self._nan = self._inf = self._zero = 0
        self._min = self._max = self._absmax = None
        self._sum, self._sum_sq = _Sum(), _Sum()
        self._sum_cube, self._sum_fourth = _Sum(), _Sum()
        self._exponents = Counter()

    def add(self, stats: Stats) -> None:
        """Add the statistics of one record, or of several."""
        self._add(stats.count, stats.nan, stats.inf, stats.zero, (stats.min, stats.max, stats.absmax))
        self._sum.add(stats.sum)
        self._sum_sq.add(stats.sum_sq)
        self._sum_cube.add(stats.sum_cube)
        self._sum_fourth.add(stats.sum_fourth)
        self._exponents.update(stats.exponent_histogram)

    def add_sum(self, other: StatsSum) -> None:
        """Add all records of another sum."""
        self._add(other._count, other._nan, other._inf, other._zero, (other._min, other._max, other._absmax))
        self._sum.add_sum(other._sum)
        self._sum_sq.add_sum(other._sum_sq)
        self._sum_cube.add_sum(other._sum_cube)
        self._sum_fourth.add_sum(other._sum_fourth)
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
        """The statistics of all records together. Without records, the count is 0 and there are no extremes."""
        exponents = [number for pair in sorted(self._exponents.items()) for number in pair]
        return public(
            StatsRow(
                self._count, self._nan, self._inf, self._zero, self._min, self._max, self._absmax,
                self._sum.value, self._sum_sq.value, exponents, self._sum_cube.value, self._sum_fourth.value,
            )
        )  # fmt: skip


class _Sum:
    """A sum of float64. Inf, NaN and terms beyond the range of float64 are added as such."""

    _units: int
    _special: float

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
