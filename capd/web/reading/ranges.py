"""The ranges of number formats, and the shares of values outside of them, from exponent histograms alone.

The limits are those of `capd.analyze.grids`, whose import needs torch and with it more memory than this page may have.
A test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from capd.store.format.statistics import Stats

__all__ = ["RANGES", "GridLimits", "Outside", "outside"]

_BIAS, _BINS = 127, 256
_NONFINITE_BIN = 255


@dataclass(frozen=True, slots=True)
class GridLimits:
    """The range of a format without a scale, or of its elements under a scale of 1, as `capd.analyze.grids.Grid`."""

    largest: float
    normal: float
    smallest: float


RANGES: Mapping[str, GridLimits] = MappingProxyType(
    {
        "hifp8": GridLimits(2.0**15, 2.0**-15, 2.0**-22),
        "e4m3": GridLimits(448.0, 2.0**-6, 2.0**-9),
        "e5m2": GridLimits(57344.0, 2.0**-14, 2.0**-16),
        "e2m1": GridLimits(6.0, 1.0, 0.5),
        "fp16": GridLimits(65504.0, 2.0**-14, 2.0**-24),
        "bf16": GridLimits(float(0xFF << 120), 2.0**-126, 2.0**-133),
    }
)
"""The formats by their labels."""


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


def outside(stats: Stats, range_: GridLimits) -> Outside:
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
