"""Per-record moments and shapes as columns: what a plain Zarr reader needs to crop and to order records.

Published in the series group's attributes under `capd.records`: {"count": n, column: list of n values, or one
value where all are equal}. Columns: the Moment's fields and `shape`. Beyond MAX_INLINE records the attribute
is {"count": n, "array": "moments"} and the columns stand in that array of the group: [record, column] int64,
column names (shape as shape_0, shape_1, …) in its attributes, -1 = none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd_client.protocol.key import Moment

__all__ = ["MAX_INLINE", "TABLE_ROWS", "ColumnRow", "Columns", "first_needed"]

MAX_INLINE = 10_000
TABLE_ROWS = 4096  # per chunk of the `moments` array; a shard has at most as many records
_FIELDS = Moment.__struct_fields__
ColumnRow = tuple[Any, ...]  # the Moment's fields, then the shape as a tuple


def first_needed(count: int, in_table: int) -> int:
    """The first record whose row is needed to publish `count` records when the array holds `in_table` already."""
    return in_table // TABLE_ROWS * TABLE_ROWS if count > MAX_INLINE else 0


class Columns:
    """The columns of `first` + len(rows) records; the rows from `first` on are at hand."""

    def __init__(self, first: int = 0, rows: Sequence[ColumnRow] = ()) -> None:
        self._first, self._rows = first, rows

    def __len__(self) -> int:
        return self._first + len(self._rows)

    @property
    def first(self) -> int:
        """The record of the first row at hand."""
        return self._first

    @property
    def is_long(self) -> bool:
        """Whether the columns belong into the `moments` array."""
        return len(self) > MAX_INLINE

    def table(self) -> tuple[list[str], NDArray[np.int64]]:
        """Column names, and the rows at hand as [record, column]; -1 stands for none."""
        *fields, shapes = zip(*self._rows, strict=True)
        moments = [
            [-1 if v is None else v for v in column] if None in column else column for column in fields
        ]
        columns = [*moments, *zip(*shapes, strict=True)]
        names = [*_FIELDS, *(f"shape_{axis}" for axis in range(len(shapes[0])))]
        return names, np.ascontiguousarray(np.array(columns, dtype=np.int64).T)

    def published(self) -> dict[str, Any]:
        """The columns as the group's attributes hold them."""
        if self.is_long:
            return {"count": len(self), "array": "moments"}
        folded: dict[str, Any] = {"count": len(self)}
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * (len(_FIELDS) + 1)
        for name, values in zip((*_FIELDS, "shape"), columns, strict=True):
            constant = bool(values) and values.count(values[0]) == len(values)
            folded[name] = values[0] if constant else values
        return folded
