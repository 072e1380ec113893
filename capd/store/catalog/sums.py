"""The catalog queries of recovery and `capd verify`, in addition to the readers' queries. Read-only."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import SeriesRow, head_of, read_acked, read_captures, read_records, read_series
from capd.store.format.frames import UNKNOWN_CLIENT, RecordRow
from capd.store.format.ranges import RangeSet
from capd_client.protocol.key import Key

__all__ = [
    "RecordSums",
    "Slice",
    "catalog_problems",
    "read_slice",
    "read_sums",
    "series_of_record",
]


class Slice(msgspec.Struct):
    """The rows of one series in a range of record numbers, and the acknowledged ranges, as one snapshot."""

    rows: dict[int, RecordRow]
    acked: dict[bytes, RangeSet]


class RecordSums(msgspec.Struct):
    """The sums over the record rows of one series. shapes: the distinct ones."""

    records: int = 0
    last: int = -1
    raw_nbytes: int = 0
    stored_nbytes: int = 0
    shapes: set[tuple[int, ...]] = set()


def catalog_problems(
    database: sqlite3.Connection, sums: Mapping[int, RecordSums]
) -> Iterator[tuple[str, str]]:
    """Yield how a catalog differs from one that is rebuilt from its own headers and record rows.

    Args:
        database: The catalog.
        sums: The sums of the same snapshot, by series id.

    Yields:
        A series path ("" for none) and the difference.
    """
    for row in read_series(database):
        said = database.execute(_SELECT_DERIVED, (row.id,)).fetchone()
        for name, found, expected in zip(_DERIVED, said, _derived(row, sums), strict=True):
            if type(found) is not type(expected) or found != expected:
                where = f"table series, row {row.id}"
                yield (
                    row.header.path,
                    f"{where}: {name} is {found!r}, but its header and records give {expected!r}",
                )
    held = Counter(client for client, _ in read_captures(database))
    if UNKNOWN_CLIENT in held:
        # Some records have lost their client, so the counts per client cannot be checked.
        return
    for client, ranges in read_acked(database).items():
        claimed = sum(last - first + 1 for first, last in ranges)
        if claimed != held[client]:
            where = f"table acked, client {client.hex()}"
            yield "", f"{where}: {claimed} captures are acknowledged, but the records hold {held[client]}"


_KEY_FIELDS = Key.__struct_fields__
_DERIVED = ("path", *_KEY_FIELDS, "dtype", "records", "raw_bytes", "max_shape", "stored_bytes")
_SELECT_DERIVED = f"SELECT {', '.join(_DERIVED)} FROM series WHERE id=?"  # noqa: S608 - names are constants


def _derived(row: SeriesRow, sums: Mapping[int, RecordSums]) -> tuple[Any, ...]:
    """Return the columns of a series as in a rebuilt catalog."""
    header, sum_ = row.header, sums.get(row.id, RecordSums())
    said = (header.path, *(getattr(header.key, name) for name in _KEY_FIELDS), header.dtype)
    if sum_.records != sum_.last + 1:
        return (*said, f"{sum_.records} up to number {sum_.last}", sum_.raw_nbytes, "", 0)
    shapes = sum_.shapes or {row.max_shape}
    same_axes = len({len(shape) for shape in shapes}) == 1
    largest = [max(axis) for axis in zip(*shapes, strict=True)] if same_axes else "shapes with other axes"
    # A share of a commit's bytes is rounded down for each of its records.
    rounded = sum_.stored_nbytes <= row.stored_bytes <= sum_.stored_nbytes + sum_.records
    stored = row.stored_bytes if rounded else sum_.stored_nbytes
    return (*said, sum_.records, sum_.raw_nbytes, json.dumps(largest), stored)


def read_slice(catalog: Path, series: int, first: int, last: int) -> Slice:
    """Return the records first ≤ number < last with their histograms.

    Raises:
        StoreError: The catalog cannot be opened.
        sqlite3.DatabaseError: A row is not valid.
    """
    database = connect_read_only(catalog)
    try:
        database.execute("BEGIN")
        rows = dict(read_records(database, series, first, last))
        acked = {client: RangeSet(ranges) for client, ranges in read_acked(database).items()}
        return Slice(rows, acked)
    finally:
        database.close()


def series_of_record(database: sqlite3.Connection, client: bytes, sequence: int) -> int | None:
    """Return the id of the series of the record with this client and sequence; None if there is none."""
    for series, body in database.execute("SELECT series, body FROM records"):
        head = head_of(body)
        if (head.client, head.sequence) == (client, sequence):
            return int(series)
    return None


def read_sums(database: sqlite3.Connection) -> dict[int, RecordSums]:
    """Return the sums over the record rows of each series id.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    found: dict[int, RecordSums] = {}
    for series, record, stored, body in database.execute(
        "SELECT series, record, stored_nbytes, body FROM records ORDER BY series, record"
    ):
        head = head_of(body)
        if not all(type(number) is int and number >= 0 for number in (series, record, stored)):
            raise sqlite3.DatabaseError(
                f"record {record!r} of series {series!r} has fields that are not numbers"
            )
        sums = found.setdefault(series, RecordSums())
        if record <= sums.last:
            raise sqlite3.DatabaseError(f"record {record} of series {series} occurs twice")
        sums.records += 1
        sums.last = record
        sums.raw_nbytes += head.nbytes
        sums.stored_nbytes += stored
        sums.shapes.add(head.shape)
    return found
