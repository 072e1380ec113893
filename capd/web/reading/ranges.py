"""The shares of values outside of the ranges of number formats, from exponent histograms alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from capd.rules.ranges import FormatRange
from capd.store.format.statistics import Stats

__all__ = ["Outside", "outside"]

_BIAS = 127
_NONFINITE_BIN = 255


@dataclass(frozen=True, slots=True)
class Outside:
    """Counts of finite values outside of a range, each as its least and its greatest possible value.

    A histogram tells the exponent of a value alone. Smallest and smallest normal values are powers of two, so these
    counts are exact but for the lowest bin. The largest value lies within a bin.

    Attributes:
        above: |x| > largest.
        below: 0 < |x| < smallest.
        flushed: 0 < |x| < normal, `below` included.
    """

    above: tuple[int, int]
    below: tuple[int, int]
    flushed: tuple[int, int]


def outside(stats: Stats, range_: FormatRange) -> Outside:
    """Count the values of a record outside of a range. No element is read."""
    bins = stats.exponent_histogram
    return Outside(
        _above(bins, stats, range_.largest),
        _less_than(bins, stats.zero, range_.smallest),
        _less_than(bins, stats.zero, range_.normal),
    )


def _above(bins: Mapping[int, int], stats: Stats, largest: float) -> tuple[int, int]:
    if stats.absmax is None or abs(stats.absmax) <= largest:
        return 0, 0
    sure = sum(n for bin_, n in bins.items() if 0 < bin_ < _NONFINITE_BIN and _low(bin_) > largest)
    perhaps = sum(
        n for bin_, n in bins.items() if 0 < bin_ < _NONFINITE_BIN and _low(bin_) <= largest < _high(bin_)
    )
    # The largest of all values is beyond.
    return max(sure, 1), sure + perhaps


def _less_than(bins: Mapping[int, int], zero: int, limit: float) -> tuple[int, int]:
    sure = sum(n for bin_, n in bins.items() if 0 < bin_ < _NONFINITE_BIN and _high(bin_) <= limit)
    # Bin 0 holds zeros, and values below 2^-126.
    tiny = max(0, bins.get(0, 0) - zero)
    return (sure + tiny,) * 2 if limit >= 2.0**-126 else (sure, sure + tiny)


def _low(bin_: int) -> float:
    return 2.0 ** (bin_ - _BIAS)


def _high(bin_: int) -> float:
    return 2.0 ** (bin_ - _BIAS + 1)
