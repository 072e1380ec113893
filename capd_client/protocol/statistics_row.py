"""The statistics row: how the statistics of one tensor lie in an arena, and in an array that keeps only them.

ROW_VALUES little-endian float64 (ROW_NBYTES bytes), without gaps:

    0 count   1 nan   2 inf   3 zero   4 min   5 max   6 absmax   7 sum   8 sum_sq   9 … 264 exponent bins 0 … 255

What each of them means: the docstring of `capd.store.format.statistics`. Counts and bins are whole numbers; packed fp4
counts both of its values. Where no element is finite, min, max and absmax are NaN and the sums 0. The bins sum to
count, and bin 255 holds nan + inf.

A rank that computed the row itself puts it into its arena, 8-byte aligned, and names the place in
`Descriptor.row_offset`. It never does so for NO_ROW_DTYPES: whole numbers beyond 2^53 are no float64, and the
minimum would not be that of the tensor. The daemon, which computes those, keeps them exactly beside the row.
"""

from __future__ import annotations

__all__ = ["EXPONENT_BINS", "NO_ROW_DTYPES", "ROW_FIELDS", "ROW_NBYTES", "ROW_VALUES"]

ROW_FIELDS = ("count", "nan", "inf", "zero", "min", "max", "absmax", "sum", "sum_sq")
EXPONENT_BINS = 256
ROW_VALUES = len(ROW_FIELDS) + EXPONENT_BINS
ROW_NBYTES = 8 * ROW_VALUES
NO_ROW_DTYPES = frozenset({"int64", "uint64"})
