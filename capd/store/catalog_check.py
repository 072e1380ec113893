"""Looks into a catalog that recovery and `capd verify` need beside what queries ask for. Read-only."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from capd.store.catalog_open import connect_read_only
from capd.store.catalog_read import SeriesRow, head_of, read_acked, read_captures, read_records, read_series
from capd.store.frames import UNKNOWN_CLIENT, RecordRow
from capd.store.ranges import RangeSet
from capd_client.key import Key

__all__ = [
    "RecordSums",
    "Slice",
    "acked_problems",
    "column_problems",
    "read_slice",
    "read_sums",
    "series_now",
    "series_of_record",
]


class Slice(msgspec.Struct):
    """Rows of one series in a range of record numbers, and the acknowledged ranges, as one snapshot."""

    rows: dict[int, RecordRow]
    acked: dict[bytes, RangeSet]


class RecordSums(msgspec.Struct):
    """What the record rows of one series add up to. shapes: the distinct ones."""

    records: int = 0
    last: int = -1
    raw_nbytes: int = 0
    stored_nbytes: int = 0
    shapes: set[tuple[int, ...]] = set()


def series_now(catalog: Path, path: str) -> SeriesRow | None:
    """The row of a series as it is now. Raises StoreError or sqlite3.DatabaseError."""
    with contextlib.closing(connect_read_only(catalog)) as database:
        return next((row for row in read_series(database, path)), None)


def column_problems(database: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Path of each series of which a column does not repeat what its header says, and how."""
    for row in read_series(database):
        said = (row.header.path, *(getattr(row.header.key, name) for name in _KEY_FIELDS), row.header.dtype)
        columns = database.execute(_SELECT_COLUMNS, (row.id,)).fetchone()
        for name, column, value in zip(_COLUMNS, columns, said, strict=True):
            if type(column) is not type(value) or column != value:
                where = f"table series, row {row.id}"
                yield row.header.path, f"{where}: {name} is {column!r}, its header says {value!r}"


def acked_problems(database: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """How the acknowledged ranges claim more, or less, than the records of each client: ("", how)."""
    held = Counter(client for client, _ in read_captures(database))
    is_whole = UNKNOWN_CLIENT not in held  # else some records have lost their names
    for client, ranges in read_acked(database).items():
        claimed = sum(last - first + 1 for first, last in ranges)
        if is_whole and claimed != held[client]:
            where = f"table acked, client {client.hex()}"
            yield "", f"{where}: {claimed} captures are acknowledged, {held[client]} are in the records"


_KEY_FIELDS = Key.__struct_fields__
_COLUMNS = ("path", *_KEY_FIELDS, "dtype")
_SELECT_COLUMNS = f"SELECT {', '.join(_COLUMNS)} FROM series WHERE id=?"  # noqa: S608 - names are constants


def read_slice(catalog: Path, series: int, first: int, last: int) -> Slice:
    """Records first ≤ number < last with their histograms. Raises StoreError or sqlite3.DatabaseError."""
    database = connect_read_only(catalog)
    try:
        database.execute("BEGIN")
        rows = dict(read_records(database, series, first, last))
        acked = {client: RangeSet(ranges) for client, ranges in read_acked(database).items()}
        return Slice(rows, acked)
    finally:
        database.close()


def series_of_record(database: sqlite3.Connection, client: bytes, sequence: int) -> int | None:
    """Id of the series that the record with this client and sequence belongs to."""
    for series, body in database.execute("SELECT series, body FROM records"):
        head = head_of(body)
        if (head.client, head.sequence) == (client, sequence):
            return int(series)
    return None


def read_sums(database: sqlite3.Connection) -> dict[int, RecordSums]:
    """Per series id what its record rows add up to."""
    found: dict[int, RecordSums] = {}
    for series, record, stored, body in database.execute(
        "SELECT series, record, stored_nbytes, body FROM records ORDER BY series, record"
    ):
        head = head_of(body)
        if not all(type(number) is int and number >= 0 for number in (series, record, stored)):
            raise sqlite3.DatabaseError(f"record {record!r} of series {series!r} has no numbers")
        sums = found.setdefault(series, RecordSums())
        if record <= sums.last:
            raise sqlite3.DatabaseError(f"record {record} of series {series} stands there twice")
        sums.records += 1
        sums.last = record
        sums.raw_nbytes += head.nbytes
        sums.stored_nbytes += stored
        sums.shapes.add(head.shape)
    return found
