"""The text histogram of values for `capd show`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capd.live.bars import bars

__all__ = ["value_bars", "value_counts"]

VALUE_BINS = 16


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
    return bars([(f"{edge:.4g}", count) for edge, count in zip(edges, counts, strict=False)])
