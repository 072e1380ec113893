"""Text histograms for `capd show`: of exponents from the stored statistics, and of the values themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["exponent_bars", "value_bars", "value_counts"]

BAR_WIDTH = 40
VALUE_BINS = 16
MAX_EXPONENT_ROWS = 32
_BIAS = 127


def exponent_bars(histogram: Mapping[int, int]) -> list[str]:
    """Return one bar for each power of two. Bin 0 holds zeros and subnormals, bin 255 NaN and infinities.

    If there are more than MAX_EXPONENT_ROWS powers, they are joined in groups of equal width.
    """
    powers = sorted(bin_ for bin_, count in histogram.items() if count and 0 < bin_ < 255)
    rows: list[tuple[str, int]] = []
    if histogram.get(0):
        rows.append(("zero, tiny", histogram[0]))
    if powers:
        low, high = powers[0], powers[-1]
        width = -(-(high - low + 1) // MAX_EXPONENT_ROWS)
        for start in range(low, high + 1, width):
            end = min(start + width - 1, high)
            label = f"2^{start - _BIAS}" if width == 1 else f"2^{start - _BIAS}…{end - _BIAS}"
            rows.append((label, sum(histogram.get(bin_, 0) for bin_ in range(start, end + 1))))
    if histogram.get(255):
        rows.append(("NaN, Inf", histogram[255]))
    return _bars(rows)


def value_counts(values: NDArray[np.generic]) -> tuple[list[float], list[int]]:
    """Return the edges and counts of VALUE_BINS equal bins over the finite values, empty without a finite value."""
    # A cast of a signalling NaN warns.
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    if not finite.size:
        return [], []
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return [low, high], [int(finite.size)]
    # The values are scaled to [0, 1] first, because the span of float64 values may overflow.
    scaled = finite / 2 - low / 2
    span = high / 2 - low / 2
    index = np.minimum((scaled / span * VALUE_BINS).astype(np.intp), VALUE_BINS - 1)
    edges = [2 * (low / 2 + span * (i / VALUE_BINS)) for i in range(VALUE_BINS)]
    return [*edges, high], np.bincount(index, minlength=VALUE_BINS).tolist()


def value_bars(values: NDArray[np.generic]) -> list[str]:
    """Return a bar for each bin of `value_counts`, labelled with the bin's lower edge."""
    edges, counts = value_counts(values)
    return _bars([(f"{edge:.4g}", count) for edge, count in zip(edges, counts, strict=False)])


def _bars(rows: Sequence[tuple[str, Any]]) -> list[str]:
    if not rows:
        return ["  (no values)"]
    most = max(count for _, count in rows)
    labels = max(len(label) for label, _ in rows)
    return [
        f"  {label:>{labels}}  {'#' * max(1 if count else 0, round(count / most * BAR_WIDTH)):<{BAR_WIDTH}} {count:,}"
        for label, count in rows
    ]
