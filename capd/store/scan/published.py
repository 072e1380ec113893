"""The published metadata of a series: the shape of its array, and the moments and shapes of its records.

Plain Zarr readers see this metadata. capd reads it to check it against the frames, and to identify a record whose
COMMIT is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import DamagedRecord, NotAStore
from capd.store.documents.json_document import document_in, is_length, read_document
from capd.store.documents.zarr_json import read_group
from capd.store.format.columns import MAX_INLINE
from capd.store.scan.moments_table import MomentsTable
from capd_client.protocol.key import Moment

__all__ = ["Published", "array_in", "read_array", "read_published", "read_shape"]

_MOMENT = Moment.__struct_fields__


class Published:
    """The moments and shapes of records 0 ≤ i < count. `read_published` creates it.

    Attributes:
        count: The number of records.
        node: The node that wrote them.
        document: The zarr.json of the series' group.
    """

    def __init__(self, document: dict[str, Any], columns: dict[str, Any], table: MomentsTable | None) -> None:
        self.count: int = columns["count"]
        self.node = str(document["attributes"]["capd"].get("node", ""))
        self.document = document
        self._columns, self._table = columns, table

    def rows(self, first: int, last: int) -> Sequence[tuple[Moment, tuple[int, ...]]]:
        """Return moment and shape of records first ≤ i < last.

        Raises:
            DamagedRecord: The columns cannot be read.
        """
        last = min(last, self.count)
        try:
            if self._table is None:
                return [self._inline(number) for number in range(first, last)]
            return [_of_table(row) for row in self._table.rows(first, last)]
        except (LookupError, TypeError, ValueError) as error:
            raise DamagedRecord(f"the published moments cannot be read: {error}") from error

    def _inline(self, number: int) -> tuple[Moment, tuple[int, ...]]:
        def value(name: str) -> Any:
            column = self._columns[name]
            return column[number] if isinstance(column, list) else column

        shape = self._columns["shape"]
        varies = bool(shape) and isinstance(shape[0], list)
        return (
            msgspec.convert([value(name) for name in _MOMENT], Moment),
            msgspec.convert(shape[number] if varies else shape, tuple[int, ...]),
        )


_OPTIONAL = frozenset(
    name for name, default in zip(_MOMENT, Moment.__struct_defaults__, strict=True) if default is None
)


def _of_table(row: list[int]) -> tuple[Moment, tuple[int, ...]]:
    named = zip(_MOMENT, row, strict=False)
    moment = {name: None if n == -1 and name in _OPTIONAL else n for name, n in named}
    moment["recompute"] = bool(moment["recompute"])
    return msgspec.convert(list(moment.values()), Moment), tuple(row[len(_MOMENT) :])


def read_published(series: Path) -> Published:
    """Return the columns of the series group at `series`.

    Raises:
        DamagedRecord: The zarr.json of the group is missing or damaged.
    """
    try:
        document = read_group(series)
        if document is None:
            raise DamagedRecord("the zarr.json of the series is missing")
        columns = document["attributes"]["capd"]["records"]
        count, table = columns["count"], None
        if "array" in columns:
            table = MomentsTable(series / "moments")
        elif not is_length(count) or count > MAX_INLINE or not _are_full(columns):
            raise DamagedRecord(f"the columns do not have {count!r} records")
        if not is_length(count) or (table is not None and count > table.count):
            raise DamagedRecord(f"the `moments` array lacks some of the {count!r} records")
        return Published(document, columns, table)
    except DamagedRecord:
        raise
    except (NotAStore, OSError, LookupError, TypeError, AttributeError) as error:
        raise DamagedRecord(f"the series' metadata cannot be read: {error}") from error


def _are_full(columns: dict[str, Any]) -> bool:
    """Return whether each column has one value, or one for each record."""
    count, shape = columns["count"], columns["shape"]
    lists = [columns[name] for name in _MOMENT if isinstance(columns[name], list)]
    if shape and isinstance(shape[0], list):
        lists.append(shape)
    return all(len(values) == count for values in lists)


def read_array(series: Path) -> dict[str, Any]:
    """Return the array document of the series at `series`.

    Raises:
        DamagedRecord: The document is missing or damaged.
    """
    try:
        document = read_document(series / "data" / "zarr.json")
    except (OSError, NotAStore) as error:
        raise DamagedRecord(f"data/zarr.json cannot be read: {error}") from error
    if document is None:
        raise DamagedRecord("data/zarr.json is missing")
    return _array_of(document)


def array_in(payload: bytes, place: object) -> dict[str, Any]:
    """Return the array document in a file that was read from `place`.

    Raises:
        DamagedRecord: The document is damaged.
    """
    try:
        return _array_of(document_in(payload, place))
    except NotAStore as error:
        raise DamagedRecord(f"data/zarr.json cannot be read: {error}") from error


def _array_of(document: dict[str, Any]) -> dict[str, Any]:
    shape = document.get("shape")
    if not isinstance(shape, list) or not shape or not all(map(is_length, shape)):
        raise DamagedRecord("data/zarr.json is not the metadata of an array")
    return document


def read_shape(series: Path) -> tuple[int, ...]:
    """Return the shape that plain Zarr readers see.

    Raises:
        DamagedRecord: The document is missing or damaged.
    """
    return tuple(read_array(series)["shape"])
