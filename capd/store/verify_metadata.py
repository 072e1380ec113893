"""Compares rows of a catalog with what they are derived from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from capd.store.catalog_check import RecordSums
from capd.store.catalog_read import SeriesRow
from capd.store.frames import RecordRow, StatsRow

__all__ = ["row_differences", "total_problems"]

_ROW_FIELDS = tuple(name for name in RecordRow.__struct_fields__ if name != "stats")


def row_differences(commit: RecordRow, row: RecordRow) -> list[str]:
    """Names of the fields in which a catalog row differs from its COMMIT."""
    found = [name for name in _ROW_FIELDS if getattr(commit, name) != getattr(row, name)]
    if commit.stats is None or row.stats is None:
        return found if commit.stats is row.stats else [*found, "stats"]
    return found + [
        name
        for name in StatsRow.__struct_fields__
        if not _equal(getattr(commit.stats, name), getattr(row.stats, name))
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def total_problems(row: SeriesRow, sums: RecordSums | None) -> Iterator[str]:
    """How the totals of a series in the catalog contradict its record rows."""
    if sums is None:
        sums = RecordSums()
    if (row.records, row.records - 1) != (sums.records, sums.last):
        yield f"{row.records} records in the series' row, {sums.records} rows up to number {sums.last}"
    if row.raw_bytes != sums.raw_nbytes:
        yield f"raw_bytes is {row.raw_bytes}, the records have {sums.raw_nbytes}"
    if not sums.stored_nbytes <= row.stored_bytes <= sums.stored_nbytes + sums.records:
        yield f"stored_bytes is {row.stored_bytes}, the records have {sums.stored_nbytes}"
    if len({len(shape) for shape in sums.shapes}) > 1:
        yield "its records have different numbers of axes"
        return
    largest = tuple(max(axis) for axis in zip(*sums.shapes, strict=True))
    if sums.records and largest != row.max_shape:
        yield f"max_shape is {list(row.max_shape)}, the records reach {list(largest)}"
