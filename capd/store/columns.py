"""Per-record moments and shapes as columns: what a plain Zarr reader needs to crop and to order records.

Published in the series group's attributes under `capd.records`: {"count": n, column: list of n values, or one
value where all are equal}. Columns: the Moment's fields and `shape`. Beyond MAX_INLINE records the attribute
is {"count": n, "array": "moments"} and the columns stand in that array of the group: [record, column] int64,
column names (shape as shape_0, shape_1, …) in its attributes, -1 = none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.store.frames import RecordRow
from capd_client.key import Moment

__all__ = ["MAX_INLINE", "Columns"]

MAX_INLINE = 10_000
_FIELDS = (*Moment.__struct_fields__, "shape")


class Columns:
    """Grows by rows, publishes as folded columns."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _FIELDS}

    def __len__(self) -> int:
        return len(self._columns["shape"])

    def extend(self, rows: Iterable[RecordRow]) -> None:
        """Append the moments and shapes of records in record order."""
        for row in rows:
            for name in _FIELDS[:-1]:
                self._columns[name].append(getattr(row.moment, name))
            self._columns["shape"].append(list(row.shape))

    @property
    def is_long(self) -> bool:
        """Whether the columns belong into the `moments` array."""
        return len(self) > MAX_INLINE

    def table(self, first: int) -> tuple[list[str], NDArray[np.int64]]:
        """Column names, and records from `first` on as [record, column]."""
        shapes = np.array(self._columns["shape"][first:], dtype=np.int64).reshape(len(self) - first, -1)
        moments = [
            [-1 if value is None else int(value) for value in self._columns[name][first:]]
            for name in _FIELDS[:-1]
        ]
        column_names = [*_FIELDS[:-1], *(f"shape_{axis}" for axis in range(shapes.shape[1]))]
        return column_names, np.concatenate([np.array(moments, dtype=np.int64).T, shapes], axis=1)

    def published(self) -> dict[str, Any]:
        """The columns as the group's attributes hold them."""
        if self.is_long:
            return {"count": len(self), "array": "moments"}
        folded: dict[str, Any] = {"count": len(self)}
        for name, values in self._columns.items():
            constant = bool(values) and all(value == values[0] for value in values)
            folded[name] = values[0] if constant else values
        return folded
