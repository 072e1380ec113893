"""Looks into a catalog that recovery and `capd verify` need beside what queries ask for. Read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from capd.store.catalog_read import connect_read_only, read_acked, read_records
from capd.store.frames import RecordRow
from capd.store.ranges import RangeSet

__all__ = ["Slice", "Sums", "read_slice", "read_sums", "series_of_record"]


class Slice(msgspec.Struct):
    """Rows of one series in a range of record numbers, and the acknowledged ranges, as one snapshot."""

    rows: dict[int, RecordRow]
    acked: dict[bytes, RangeSet]


class Sums(msgspec.Struct):
    """What the record rows of one series add up to. shapes: the distinct ones, as JSON."""

    records: int
    last: int
    raw_nbytes: int
    stored_nbytes: int
    shapes: list[str]


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
    found = database.execute(
        "SELECT series FROM records WHERE client=? AND sequence=? LIMIT 1", (client, sequence)
    ).fetchone()
    return None if found is None else int(found[0])


def read_sums(database: sqlite3.Connection) -> Iterator[tuple[int, Sums]]:
    """Per series id what its record rows add up to."""
    shapes: dict[int, list[str]] = {}
    for series, shape in database.execute("SELECT DISTINCT series, shape FROM records"):
        shapes.setdefault(series, []).append(shape)
    for series, count, last, raw, stored in database.execute(
        "SELECT series, COUNT(*), MAX(record), TOTAL(nbytes), TOTAL(stored_nbytes) FROM records GROUP BY series"
    ):
        yield series, Sums(count, last, int(raw), int(stored), shapes.get(series, []))
