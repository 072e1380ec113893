"""The statistics row: the statistics of one tensor as bytes, in an arena or in an array of statistics alone.

A row is ROW_VALUES little-endian float64 (ROW_NBYTES bytes), without gaps:

    0 count   1 nan   2 inf   3 zero   4 min   5 max   6 absmax   7 sum   8 sum_sq   9 … 264 exponent bins 0 … 255
    265 sum_cube   266 sum_fourth

This is version 2 of the row. A version only appends values: version 1 had the first 265.

The docstring of `capd.store.format.statistics` defines each value. Counts and bins are whole numbers. Packed fp4 counts
both of its values. If no element is finite, min, max and absmax are NaN and the sums are 0. The bins sum to count, and
bin 255 holds nan + inf.

A rank that computed the row itself puts it into its arena, 8-byte aligned, and names the place in
`Descriptor.row_offset`. It never does so for NO_ROW_DTYPES: float64 cannot hold every whole number beyond 2^53, so the
minimum could be wrong. The daemon computes those rows, and stores the exact values in addition to the row.
"""

from __future__ import annotations

__all__ = [
    "BINS",
    "EXPONENT_BINS",
    "NO_ROW_DTYPES",
    "POWER_SUMS",
    "ROW_FIELDS",
    "ROW_NBYTES",
    "ROW_VALUES",
    "ROW_VERSION",
]

ROW_FIELDS = ("count", "nan", "inf", "zero", "min", "max", "absmax", "sum", "sum_sq")
EXPONENT_BINS = 256
BINS = slice(len(ROW_FIELDS), len(ROW_FIELDS) + EXPONENT_BINS)
POWER_SUMS = ("sum_cube", "sum_fourth")
ROW_VERSION = 2
ROW_VALUES = BINS.stop + len(POWER_SUMS)
ROW_NBYTES = 8 * ROW_VALUES
NO_ROW_DTYPES = frozenset({"int64", "uint64"})
