"""Looks into a catalog that recovery and `capd verify` need beside what queries ask for. Read-only."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from capd.store.catalog_open import connect_read_only
from capd.store.catalog_read import head_of, read_acked, read_records
from capd.store.frames import RecordRow
from capd.store.ranges import RangeSet

__all__ = ["Slice", "Sums", "has_series", "read_slice", "read_sums", "series_of_record"]


class Slice(msgspec.Struct):
    """Rows of one series in a range of record numbers, and the acknowledged ranges, as one snapshot."""

    rows: dict[int, RecordRow]
    acked: dict[bytes, RangeSet]


class Sums(msgspec.Struct):
    """What the record rows of one series add up to. shapes: the distinct ones."""

    records: int = 0
    last: int = -1
    raw_nbytes: int = 0
    stored_nbytes: int = 0
    shapes: set[tuple[int, ...]] = set()


def has_series(catalog: Path, path: str) -> bool:
    """Whether the catalog knows a series now. Raises StoreError or sqlite3.DatabaseError."""
    database = connect_read_only(catalog)
    try:
        return database.execute("SELECT 1 FROM series WHERE path=?", (path,)).fetchone() is not None
    finally:
        database.close()


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


def read_sums(database: sqlite3.Connection) -> dict[int, Sums]:
    """Per series id what its record rows add up to."""
    found: dict[int, Sums] = {}
    for series, record, stored, body in database.execute(
        "SELECT series, record, stored_nbytes, body FROM records ORDER BY series, record"
    ):
        head = head_of(body)
        if not all(type(number) is int and number >= 0 for number in (series, record, stored)):
            raise sqlite3.DatabaseError(f"record {record!r} of series {series!r} has no numbers")
        sums = found.setdefault(series, Sums())
        sums.records += 1
        sums.last = record
        sums.raw_nbytes += head.nbytes
        sums.stored_nbytes += stored
        sums.shapes.add(head.shape)
    return found
