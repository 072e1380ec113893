"""Sums of float64 without rounding: whole numbers of a unit so small that every float64 is a multiple of it.

Addition of whole numbers is associative and commutative, so sums come out the same to the bit however the terms are
grouped and ordered; only `rounded` and `quotient` round, once, to nearest. A sum takes some 300 bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["exact", "quotient", "rounded", "weighted"]

_DIGITS = 53  # of a float64
_SHIFT = 1074 + _DIGITS  # the unit is 2**-_SHIFT
_ONE = 1 << _SHIFT
_LOW = 27
_LOW_MASK = (1 << _LOW) - 1
_MOST = 1 << 36  # counts up to here keep the sums of half mantissas within 63 bits


def exact(value: float) -> int:
    """A finite float64 in units."""
    mantissa, exponent = math.frexp(value)
    return int(math.ldexp(mantissa, _DIGITS)) << (exponent - _DIGITS + _SHIFT)


def weighted(values: NDArray[np.float64], counts: NDArray[np.int64]) -> int:
    """The sum of finite values times their counts, in units; counts are not negative."""
    mantissas, exponents = np.frexp(values)
    whole = np.ldexp(mantissas, _DIGITS).astype(np.int64)
    if int(counts.sum()) > _MOST:
        pairs = zip(whole.tolist(), counts.tolist(), exponents.tolist(), strict=True)
        return sum(mantissa * count << (exponent - _DIGITS + _SHIFT) for mantissa, count, exponent in pairs)
    order = np.argsort(exponents, kind="stable")
    present, starts = np.unique(exponents[order], return_index=True)
    if not present.size:
        return 0
    high = np.add.reduceat((whole >> _LOW)[order] * counts[order], starts)
    low = np.add.reduceat((whole & _LOW_MASK)[order] * counts[order], starts)
    parts = zip(high.tolist(), low.tolist(), present.tolist(), strict=True)
    return sum(((up << _LOW) + down) << (exponent - _DIGITS + _SHIFT) for up, down, exponent in parts)


def rounded(total: int) -> float:
    """A sum as the nearest float64; Inf beyond its range."""
    return quotient(total, _ONE) or 0.0


def quotient(a: int, b: int) -> float | None:
    """a / b, to the nearest float64, Inf beyond its range; None where b is 0."""
    if b == 0:
        return None
    try:
        return a / b
    except OverflowError:
        return math.inf if (a > 0) == (b > 0) else -math.inf
