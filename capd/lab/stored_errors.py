"""The stored form of the errors of formats on one record, and how they are found again.

A row is one byte, the version, then the msgpack form of its fields (`capd.analyze.packed.codec`). All sums are whole
numbers, so what is read back equals what was measured to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from capd.analyze.error_sums import Errors
from capd.analyze.packed.codec import Damaged, pack, unpack
from capd.errors import DamagedRecord
from capd.store.format.frames import RecordHead
from capd_client.protocol.key import Key, Moment

__all__ = ["MeasuredRow", "StoredErrors", "errors_among", "pack_row", "unpack_row"]

_VERSION = b"\x01"


@dataclass(frozen=True, slots=True)
class StoredErrors:
    """The errors of formats on one record.

    Attributes:
        client, sequence: The capture, as its record names it.
        errors: The errors by the format's label.
        problems: Why some formats do not take the tensor, as "mxfp8: reason".
    """

    client: bytes
    sequence: int
    errors: dict[str, Errors]
    problems: list[str]


class MeasuredRow(NamedTuple):
    """A row that was stored, and the record that it is of.

    Attributes:
        series: The path of the record's series.
        key, moment: Of the record.
        data: The bytes of the row.
    """

    series: str
    key: Key
    moment: Moment
    data: bytes


def pack_row(row: StoredErrors) -> bytes:
    """Return the bytes of a row."""
    return _VERSION + pack(row, StoredErrors)


def unpack_row(data: bytes) -> StoredErrors:
    """Return the row that has these bytes.

    Raises:
        DamagedRecord: The bytes are of no row, or of a newer capd.
    """
    if data[:1] != _VERSION:
        raise DamagedRecord("the errors of a record have a form that this version of capd does not know")
    try:
        return unpack(data[1:], StoredErrors)
    except Damaged as error:
        raise DamagedRecord(f"the errors of a record cannot be read: {error}") from error


def errors_among(rows: Iterable[bytes], head: RecordHead) -> dict[str, Errors]:
    """Return the errors of one record among rows of its moment, by the format's label; {} if it was not measured.

    Raises:
        DamagedRecord: A row cannot be read.
    """
    for data in rows:
        row = unpack_row(data)
        if (row.client, row.sequence) == (head.client, head.sequence):
            return row.errors
    return {}
