"""The statistics of a record as one statistics row (`capd_client.protocol.statistics_row`): packing and unpacking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capd.store.format.frames import StatsRow
from capd.store.format.statistics import is_whole
from capd_client.protocol.statistics_row import BINS, ROW_FIELDS, ROW_VALUES

__all__ = ["pack", "unpack"]

_HEAD, _POWERS = slice(BINS.start), slice(BINS.stop, ROW_VALUES)


def pack(stats: StatsRow) -> bytes:
    """Return the bytes of the row. Whole numbers beyond 2^53 are rounded."""
    row = np.zeros(ROW_VALUES, dtype="<f8")
    row[_HEAD] = [np.nan if (value := getattr(stats, name)) is None else value for name in ROW_FIELDS]
    row[BINS.start + np.array(stats.exponents[::2], dtype=np.intp)] = stats.exponents[1::2]
    row[_POWERS] = stats.sum_cube, stats.sum_fourth
    return row.tobytes()


def unpack(row: NDArray[np.generic], dtype: str) -> StatsRow:
    """Return the statistics in a consistent row of a tensor of torch dtype `dtype`."""
    count, nan, infinite, zero, low, high, largest, total, squares = row[_HEAD].tolist()
    low, high, largest = (
        None if end != end else int(end) if is_whole(dtype) else end for end in (low, high, largest)
    )
    used = np.flatnonzero(row[BINS])
    exponents = np.stack([used, row[BINS.start + used].astype(np.int64)], axis=-1).ravel().tolist()
    cubes, fourths = row[_POWERS].tolist()
    return StatsRow(
        int(count),
        int(nan),
        int(infinite),
        int(zero),
        low,
        high,
        largest,
        total,
        squares,
        exponents,
        cubes,
        fourths,
    )
