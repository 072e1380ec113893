"""Kurtosis and crest factor of tensors, by sums of powers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from capd.analyze.exact import ShortSum
from capd.analyze.trends.sums import Largest, Number, TrendSums, finite_pieces

if TYPE_CHECKING:
    import torch

__all__ = ["PowerSums", "power_sums"]


@dataclass(slots=True)
class PowerSums(TrendSums):
    """Sums of powers of the finite values about 0, from which the moments of any number of tensors follow.

    kurtosis = E[(x - µ)⁴] / σ⁴, 3 for a normal distribution. crest factor = max|x| / √E[x²].

    Source: CHON, arXiv 2602.02047, figure 1 (kurtosis of activations). "Towards Fully FP8 GEMM LLM Training at Scale",
    arXiv 2505.20524, has it as an early warning of divergence.

    Attributes:
        count: All values.
        finite: The values that are neither NaN nor Inf.
        first, second, third, fourth: Σx, Σx², Σx³, Σx⁴ over the finite values.
        largest: max|x|.
    """

    count: int = 0
    finite: int = 0
    first: ShortSum = field(default_factory=ShortSum)
    second: ShortSum = field(default_factory=ShortSum)
    third: ShortSum = field(default_factory=ShortSum)
    fourth: ShortSum = field(default_factory=ShortSum)
    largest: Largest = field(default_factory=Largest)

    @property
    def kurtosis(self) -> float | None:
        """E[(x - µ)⁴] / σ⁴, None for equal values. The central moments follow without rounding."""
        if not self.finite:
            return None
        # Differences of powers lose all digits in floats if the mean is large.
        m1, m2, m3, m4 = (
            _exactly(one) / self.finite for one in (self.first, self.second, self.third, self.fourth)
        )
        variance = m2 - m1**2
        # Each record's Σx² is rounded, so that equal values may keep a tiny variance.
        if variance <= m2 * Fraction(1, 2**48):
            return None
        return float((m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2)

    @property
    def crest_factor(self) -> float | None:
        """max|x| / RMS, None if all values are 0."""
        square = self.second.value
        return self.largest.value / math.sqrt(square / self.finite) if square else None

    def numbers(self) -> dict[str, Number]:
        """Return `values`, `kurtosis`, `crest_factor` and `absmax`."""
        return {
            "values": self.count,
            "kurtosis": self.kurtosis,
            "crest_factor": self.crest_factor,
            "absmax": self.largest.value if self.finite else None,
        }


def power_sums(values: torch.Tensor) -> PowerSums:
    """Return the sums of one tensor of any shape. Its own sums are float64 sums of pieces."""
    found = PowerSums(values.numel())
    for x in finite_pieces(values):
        if not x.size:
            continue
        square = x * x
        found.finite += x.size
        found.first.add(float(x.sum()))
        found.second.add(float(square.sum()))
        found.third.add(float((square * x).sum()))
        found.fourth.add(float((square * square).sum()))
        found.largest.value = max(found.largest.value, float(abs(x).max()))
    return found


def _exactly(total: ShortSum) -> Fraction:
    return total.mantissa * Fraction(2) ** total.exponent
