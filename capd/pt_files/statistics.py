"""The numbers of a `tensor_info`: min, max, mean and std by tensor_saver's definitions, not capd's.

In tensor_saver min and max are NaN if one element is, Inf counts as a value, and std is the sample's (n - 1). An empty
tensor has 0.0 everywhere. If one element is NaN, or all are finite, the numbers follow from the record's statistics.
If one element is Inf, or the sums would cancel, they are computed from the elements, block by block in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import to_values
from capd.store.format.statistics import Stats

__all__ = ["saved_statistics"]

_NAMES = ("min", "max", "mean", "std")
_BLOCK = 1 << 18
# A share of the mean square. A variance below it has lost half of its digits.
_CANCELS = 1e-6


def saved_statistics(bits: NDArray[np.generic], dtype: str, stats: Stats | None) -> dict[str, float]:
    """Return min, max, mean and std of a record.

    Args:
        bits: The stored elements.
        dtype: The torch dtype's name.
        stats: The committed statistics, None if the record has none.
    """
    if bits.size == 0:
        return dict.fromkeys(_NAMES, 0.0)
    derived = None if stats is None else _derived(stats)
    return _computed(bits, dtype) if derived is None else derived


def _derived(stats: Stats) -> dict[str, float] | None:
    n = stats.count
    if stats.nan:
        return dict.fromkeys(_NAMES, math.nan)
    if stats.inf or stats.min is None or stats.max is None or not math.isfinite(stats.sum_sq):
        return None
    mean = stats.sum / n
    variance = stats.sum_sq / n - mean * mean
    if variance <= _CANCELS * stats.sum_sq / n and stats.sum_sq:
        return None
    std = math.sqrt(max(0.0, variance) * n / (n - 1)) if n > 1 else math.nan
    return {"min": float(stats.min), "max": float(stats.max), "mean": mean, "std": std}


# Inf - Inf is NaN in tensor_saver, too.
@np.errstate(invalid="ignore", over="ignore")
def _computed(bits: NDArray[np.generic], dtype: str) -> dict[str, float]:
    flat = bits.reshape(-1)
    found = [(block.size, block.min(), block.max(), block.sum()) for block in _blocks(flat, dtype)]
    counts, lows, highs, sums = map(np.array, zip(*found, strict=True))
    n = int(counts.sum())
    mean = float(sums.sum() / n)
    squares = float(np.array([np.square(block - mean).sum() for block in _blocks(flat, dtype)]).sum())
    return {
        "min": float(lows.min()),
        "max": float(highs.max()),
        "mean": mean,
        "std": math.sqrt(squares / (n - 1)) if n > 1 else math.nan,
    }


def _blocks(flat: NDArray[np.generic], dtype: str) -> Iterator[NDArray[np.float64]]:
    for at in range(0, flat.size, _BLOCK):
        yield to_values(flat[at : at + _BLOCK], dtype).astype(np.float64).reshape(-1)
