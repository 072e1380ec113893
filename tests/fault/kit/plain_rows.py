"""Statistics of a tensor as numpy computes them, for the log of what was offered. Imports nothing of capd."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["row_digest", "row_of"]

_SUMS = [7, 8, 265, 266]  # the sums of powers depend on the order of adding


def row_of(values: NDArray[Any]) -> NDArray[np.float64]:
    """The row of docs/protocol.md for `values`, which float32 holds exactly; its sums are left at 0."""
    flat = values.astype(np.float32).reshape(-1)
    finite = flat[np.isfinite(flat)]
    low, high = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
    nan, infinite = np.isnan(flat).sum(), np.isinf(flat).sum()
    fields = [flat.size, nan, infinite, (flat == 0).sum(), low, high, max(-low, high), 0, 0]
    bins = np.bincount(flat.view(np.uint32) >> 23 & 0xFF, minlength=256)
    return np.concatenate([np.array(fields, dtype=np.float64), bins.astype(np.float64), np.zeros(2)])


def row_digest(shape: tuple[int, ...], row: NDArray[np.float64]) -> str:
    """One word for everything in a row but its sums, and for the shape of its tensor."""
    exact = np.where(np.isnan(row), np.nan, row) + 0.0  # one NaN, one zero
    exact[_SUMS] = 0
    key = repr(("row", *shape)).encode()[:64]
    return hashlib.blake2b(exact.tobytes(), digest_size=16, key=key).hexdigest()
