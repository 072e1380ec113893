"""The shape of a distribution of values, its spread and its tails, from exact counts.

Each number covers the finite values. If `Distribution.exact` is False, they are rounded to bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from capd.analyze.channels import OUTLIER_SIGMAS
from capd.analyze.distribution import Distribution

__all__ = ["Shape", "shape_of"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a distribution. A number is None if it would divide by 0.

    Attributes:
        dynamic_range: log2(max|x|) - log2(min |x| of the non-zero) (TransformerEngine's `dynamic_range`).
        crest_factor: max|x| / RMS.
        kurtosis: E[(x - µ)⁴] / σ⁴, 3 for a normal distribution.
        outlier_percent: 100 * share of |x| > 6 σ.
    """

    dynamic_range: float | None
    crest_factor: float | None
    kurtosis: float | None
    outlier_percent: float | None


def shape_of(distribution: Distribution) -> Shape:
    """Return the shape of all values of a distribution, the same to the bit in whatever order they were added."""
    values, counts = distribution.finite()
    magnitude = np.abs(values)
    some = magnitude[magnitude > 0]
    if not some.size:
        return Shape(None, None, None, None if not values.size else 0.0)
    largest = float(some.max())
    # The scaled values are in [-1, 1], so no power overflows.
    scaled, total = values / largest, int(counts.sum())
    weights = counts.astype(np.float64)
    mean = float((weights * scaled).sum()) / total
    variance = float((weights * (scaled - mean) ** 2).sum()) / total
    fourth = float((weights * (scaled - mean) ** 4).sum()) / total
    rms = math.sqrt(float((weights * scaled**2).sum()) / total)
    outliers = int(counts[magnitude > OUTLIER_SIGMAS * math.sqrt(variance) * largest].sum())
    return Shape(
        dynamic_range=math.log2(largest) - math.log2(float(some.min())),
        crest_factor=1 / rms,
        kurtosis=fourth / variance**2 if variance else None,
        outlier_percent=100 * outliers / total,
    )
