"""The error of a quantisation: sums over values before and after it, which merge exactly.

x is a value, y is the quantised value, d = y - x, and N is the number of values. y is float32 as decoded, not rounded
back to x's dtype.

NaN and Inf in x are counted and left out of every sum. Finite values that the format turns into NaN or Inf are left
out, too, and counted as `lost`. Examples are the neighbours of a NaN in a block, and overflow to Inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capd.analyze.blocks import BlockStatistics
from capd.analyze.exact import RatioSpread, exact, quotient, rounded, weighted

__all__ = ["ErrorCounts", "ErrorSums", "Errors", "decibels", "merged", "percent"]

Floats = NDArray[np.float64]


@dataclass(slots=True)
class ErrorSums:
    """Sums over the compared values, in the whole units of `capd.analyze.exact`. They never round."""

    x2: int = 0
    y2: int = 0
    xy: int = 0
    d2: int = 0
    abs_x: int = 0
    abs_d: int = 0

    def add(self, other: ErrorSums) -> None:
        """Add the sums of other values."""
        self.x2 += other.x2
        self.y2 += other.y2
        self.xy += other.xy
        self.d2 += other.d2
        self.abs_x += other.abs_x
        self.abs_d += other.abs_d


@dataclass(slots=True)
class ErrorCounts:
    """The values of any number of records that a format could not keep.

    Attributes:
        records: The number of tensors.
        count: N, including all values that the sums leave out.
        lost: The finite values that became NaN or Inf.
        underflows: The values that were not zero before and are zero after.
        saturations: The values with |x| beyond the largest value of the format under the block's scale.
        flushes: The values with 0 < |x| < the smallest normal value under that scale, all of a block whose scale is 0.
    """

    records: int = 0
    count: int = 0
    lost: int = 0
    underflows: int = 0
    saturations: int = 0
    flushes: int = 0

    def add_counts(self, other: ErrorCounts) -> None:
        """Add the counts of other records."""
        self.records += other.records
        self.count += other.count
        self.lost += other.lost
        self.underflows += other.underflows
        self.saturations += other.saturations
        self.flushes += other.flushes

    @property
    def underflow_percent(self) -> float | None:
        """100 * underflows / N (TransformerEngine's `underflows%`: non-zero in, zero out)."""
        return percent(self.underflows, self.count)

    @property
    def saturation_percent(self) -> float | None:
        """100 * saturations / N: finite values beyond the largest one (TransformerEngine's `overflows%`)."""
        return percent(self.saturations, self.count)

    @property
    def flush_percent(self) -> float | None:
        """100 * flushes / N: values below the smallest normal value, which lose precision (tensor_saver's tools)."""
        return percent(self.flushes, self.count)

    @property
    def lost_percent(self) -> float | None:
        """100 * lost / N."""
        return percent(self.lost, self.count)


@dataclass(slots=True)
class Errors(ErrorCounts):
    """Errors of any number of records. `add` is exactly associative and commutative. Not thread-safe.

    Properties that divide by a sum are None if the sum is 0.

    Attributes:
        nan: The NaN of the input.
        inf: The Inf of the input.
        absmax: max|x| over the compared values.
        max_abs: max|d| over the compared values.
        blocks: The blocks, None for a format without scales.
        spread: The spread of Σd² / Σx² over several records, None for one.
    """

    nan: int = 0
    inf: int = 0
    absmax: float = 0.0
    max_abs: float = 0.0
    sums: ErrorSums = field(default_factory=ErrorSums)
    blocks: BlockStatistics | None = None
    spread: RatioSpread | None = field(default=None, compare=False)

    def add(self, other: Errors) -> None:
        """Add all values of other errors of the same format."""
        spread = self._spread()
        spread.add(other._spread())
        self.spread = spread
        self.add_counts(other)
        self.nan += other.nan
        self.inf += other.inf
        self.absmax = max(self.absmax, other.absmax)
        self.max_abs = max(self.max_abs, other.max_abs)
        self.sums.add(other.sums)
        if other.blocks is not None:
            self.blocks = BlockStatistics(other.blocks.scale_type) if self.blocks is None else self.blocks
            self.blocks.add(other.blocks)

    def add_values(self, x: Floats, y: Floats, counts: NDArray[np.int64] | None = None) -> None:
        """Add compared values to the sums and maxima. No count changes.

        Args:
            x: The values before the quantisation.
            y: The values after it.
            counts: The count of each pair of values. Without counts, the float64 sums of the arrays are added.
        """

        def total(terms: Floats) -> int:
            return exact(float(terms.sum())) if counts is None else weighted(terms, counts)

        if not x.size:
            return
        d, magnitude = y - x, np.abs(x)
        self.absmax = max(self.absmax, float(magnitude.max()))
        terms = np.multiply(x, y)
        sums = ErrorSums(xy=total(terms), abs_x=total(magnitude))
        sums.x2 = total(np.multiply(x, x, out=terms))
        sums.y2 = total(np.multiply(y, y, out=terms))
        sums.d2 = total(np.multiply(d, d, out=terms))
        np.abs(d, out=d)
        self.max_abs = max(self.max_abs, float(d.max()))
        sums.abs_d = total(d)
        self.sums.add(sums)

    @property
    def compared(self) -> int:
        """The number of values that the sums cover: N without NaN, Inf and lost values."""
        return self.count - self.nan - self.inf - self.lost

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantisation noise, 10 * log10(Σx² / Σd²). Inf without an error (torch.ao.ns `compute_sqnr`)."""
        return decibels(self.sums.x2, self.sums.d2)

    @property
    def sqnr_db_error(self) -> float | None:
        """The standard error of `sqnr_db`, in dB, if the records are a sample of many. None with fewer than two."""
        share = self._spread().relative_error(self.sums.x2, self.sums.d2)
        return None if share is None else 10 / math.log(10) * share

    @property
    def mse(self) -> float | None:
        """Mean squared error, Σd² / N of the compared values (TransformerEngine's `mse`; tensor_saver's tools)."""
        return self._mean(self.sums.d2)

    @property
    def rmse(self) -> float | None:
        """Root of `mse`."""
        return None if self.mse is None else math.sqrt(self.mse)

    @property
    def mae(self) -> float | None:
        """Mean absolute error, Σ|d| / N of the compared values (tensor_saver's tools)."""
        return self._mean(self.sums.abs_d)

    @property
    def relative(self) -> float | None:
        """Relative error, Σ|d| / Σ|x| = MAE / mean|x|, as a share (tensor_saver's tools, in percent)."""
        return quotient(self.sums.abs_d, self.sums.abs_x)

    @property
    def relative_mse(self) -> float | None:
        """Σd² / Σx² = MSE / mean(x²). The QSNR of arXiv 2302.08007 is -10 * log10 of it."""
        return quotient(self.sums.d2, self.sums.x2)

    @property
    def normalised_l2(self) -> float | None:
        """‖d‖ / ‖x‖ = √(Σd² / Σx²) (torch.ao.ns `compute_normalized_l2_error`)."""
        return None if self.relative_mse is None else math.sqrt(self.relative_mse)

    @property
    def cosine(self) -> float | None:
        """Σxy / √(Σx² Σy²) (torch.ao.ns `compute_cosine_similarity`; msprobe requires at least 0.9999)."""
        return quotient(self.sums.xy, math.isqrt(self.sums.x2 * self.sums.y2))

    @property
    def psnr_db(self) -> float | None:
        """Peak signal to noise, 20 * log10(max|x| / RMSE). Inf without an error (tensor_saver's tools)."""
        if not self.absmax or self.mse is None:
            return None
        return math.inf if not self.mse else 20 * math.log10(self.absmax) - 10 * math.log10(self.mse)

    def _spread(self) -> RatioSpread:
        if self.spread is not None:
            return self.spread
        return RatioSpread.of_record(self.sums.x2, self.sums.d2) if self.records else RatioSpread()

    def _mean(self, total: int) -> float | None:
        return rounded(total) / self.compared if self.compared else None


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 * log10(signal / noise), of energies in any unit. Inf without noise, None without both."""
    if not noise:
        return math.inf if signal else None
    share = quotient(signal, noise)
    return 10 * math.log10(share) if share else -math.inf


def percent(number: int, count: int) -> float | None:
    """Return 100 * number / count, None without any."""
    return 100 * number / count if count else None


def merged(several: Iterable[Errors]) -> Errors:
    """Return the sum of several errors."""
    found = Errors()
    for one in several:
        found.add(one)
    return found
