"""The moments and shapes of records as columns: a plain Zarr reader needs them to crop and to order records.

The series group's attributes publish them under `capd.records`: {"count": n, column: list of n values, or one value if
all are equal}. The columns are the fields of Moment, and `shape`.

For more than MAX_INLINE records the attribute is {"count": n, "array": "moments"}. The group's array `moments` then
holds the columns as [record, column] int64, where -1 is none. Its attributes hold the column names (shape as shape_0,
shape_1, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd_client.protocol.key import Moment

__all__ = ["MAX_INLINE", "TABLE_ROWS", "ColumnRow", "Columns", "first_needed"]

MAX_INLINE = 10_000
# The rows of a chunk of the `moments` array. A shard has at most as many records.
TABLE_ROWS = 4096
_FIELDS = Moment.__struct_fields__
# The fields of a Moment, followed by the shape as a tuple.
ColumnRow = tuple[Any, ...]


def first_needed(count: int, in_table: int) -> int:
    """Return the first record whose row is needed to publish `count` records, if the `moments` array has `in_table`."""
    return in_table // TABLE_ROWS * TABLE_ROWS if count > MAX_INLINE else 0


class Columns:
    """The columns of `first` + len(rows) records. Only the rows from `first` on are available."""

    def __init__(self, first: int = 0, rows: Sequence[ColumnRow] = ()) -> None:
        self._first, self._rows = first, rows

    def __len__(self) -> int:
        return self._first + len(self._rows)

    @property
    def first(self) -> int:
        """The number of the record of the first available row."""
        return self._first

    @property
    def is_long(self) -> bool:
        """Whether the columns belong in the `moments` array."""
        return len(self) > MAX_INLINE

    def table(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the column names, and the available rows as [record, column]. -1 is none."""
        *fields, shapes = zip(*self._rows, strict=True)
        moments = [
            [-1 if v is None else v for v in column] if None in column else column for column in fields
        ]
        columns = [*moments, *zip(*shapes, strict=True)]
        names = [*_FIELDS, *(f"shape_{axis}" for axis in range(len(shapes[0])))]
        return names, np.ascontiguousarray(np.array(columns, dtype=np.int64).T)

    def published(self) -> dict[str, Any]:
        """Return the columns in the form of the group's attributes."""
        if self.is_long:
            return {"count": len(self), "array": "moments"}
        folded: dict[str, Any] = {"count": len(self)}
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * (len(_FIELDS) + 1)
        for name, values in zip((*_FIELDS, "shape"), columns, strict=True):
            constant = bool(values) and values.count(values[0]) == len(values)
            folded[name] = values[0] if constant else values
        return folded
