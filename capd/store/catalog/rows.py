"""Rows of a catalog: what they hold, and how they are read beside a live daemon."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from capd.store.documents.headers import is_usable
from capd.store.format.columns import ColumnRow
from capd.store.format.dtypes import is_statistics
from capd.store.format.frames import RecordHead, RecordRow, SeriesHeader, decode_head, decode_row
from capd_client.protocol.key import MAX_INDEX, MAX_NDIM, Key

__all__ = [
    "CATALOG_NAME",
    "LedgerRow",
    "SeriesRow",
    "SessionRow",
    "has_attempt",
    "head_of",
    "read_acked",
    "read_attempts",
    "read_captures",
    "read_columns",
    "read_heads",
    "read_records",
    "read_series",
]

CATALOG_NAME = "catalog.sqlite"
H = TypeVar("H", RecordHead, RecordRow)


@dataclass(slots=True)
class LedgerRow:
    """Cumulative drops of one key under one reason in one session."""

    key: Key
    dtype: str
    reason: str
    count: int
    nbytes: int
    first_iteration: int
    last_iteration: int


@dataclass(slots=True)
class SessionRow:
    """Counters of one rank's session.

    state: "live", "ended" (left in order) or "died". end: how the process of one that died ended, "" if unknown.
    """

    client: bytes
    rank: int
    attempt: int
    host: str
    pid: int
    started_ns: int
    ended_ns: int | None
    state: str
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    drops: list[LedgerRow] = field(default_factory=list)
    end: str = ""

    @property
    def clean(self) -> bool:
        """Whether the counters are final; those of a session cut off by the daemon's death are not, nor of one that was
        over with captures still in work."""
        return self.state != "live" and not self.in_flight


@dataclass(slots=True)
class SeriesRow:
    """One series as the catalog knows it. stored_bytes: encoded payload and frames."""

    id: int
    header: SeriesHeader
    records: int
    sealed: int
    sealing: bool
    max_shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int


_SELECT_SERIES = "SELECT id, header, records, sealed, sealing, max_shape, raw_bytes, stored_bytes FROM series"
_decode_header = msgspec.msgpack.Decoder(SeriesHeader).decode


def read_series(db: sqlite3.Connection, path: str | None = None) -> list[SeriesRow]:
    """All series of a catalog, or the one at `path`. Raises sqlite3.DatabaseError where one makes no sense."""
    where, given = ("", ()) if path is None else (" WHERE path=?", (path,))
    found: list[SeriesRow] = []
    for row in db.execute(_SELECT_SERIES + where, given):
        found.append(_series_row(row))
        if len(found) > 1 and found[-2].id >= found[-1].id:  # pages that form a circle
            raise sqlite3.DatabaseError(f"series {found[-1].id} stands there twice")
    return found


def _series_row(row: tuple[Any, ...]) -> SeriesRow:
    identity, header, records, sealed, sealing, max_shape, raw, stored = row
    try:
        shape = tuple(json.loads(max_shape))
        found = SeriesRow(
            identity, _decode_header(header), records, sealed, bool(sealing), shape, raw, stored
        )
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"the row of series {identity!r} cannot be read: {error}") from error
    if not is_usable(found.header):
        raise sqlite3.DatabaseError(f"what it says of {found.header.path!r} makes no sense")
    counts = (identity, records, sealed, raw, stored, *shape)
    if not all(type(n) is int and 0 <= n <= MAX_INDEX for n in counts) or not _is_within(found):
        raise sqlite3.DatabaseError(f"its totals of {found.header.path} make no sense")
    return found


def _is_within(row: SeriesRow) -> bool:
    """Whether records of the largest shape fit the series."""
    anything = is_statistics(row.header.dtype) or not row.records
    return len(row.max_shape) <= MAX_NDIM if anything else row.header.geometry.fits(row.max_shape)


def read_captures(database: sqlite3.Connection) -> Iterator[tuple[bytes, int]]:
    """Client and sequence of every record."""
    for (body,) in database.execute("SELECT body FROM records"):
        head = head_of(body)
        yield head.client, head.sequence


def read_acked(db: sqlite3.Connection) -> dict[bytes, list[tuple[int, int]]]:
    """Committed sequence ranges per client uuid."""
    try:
        found = {bytes(client): _decode_ranges(ranges) for client, ranges in db.execute(_SELECT_ACKED)}
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"the acknowledged ranges cannot be read: {error}") from error
    for ranges in found.values():
        ends = [end for both in ranges for end in both] or [0]
        if ends != sorted(ends) or not 0 <= ends[0] <= ends[-1] < MAX_INDEX:
            raise sqlite3.DatabaseError("the acknowledged ranges are not in order")
    return found


_SELECT_ACKED = "SELECT client, ranges FROM acked"
_decode_ranges = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


_SELECT_ROWS = (
    "SELECT record, attempt, body FROM records WHERE series=? AND record>=? AND record<? ORDER BY record"
)


def read_records(
    db: sqlite3.Connection, series: int, first: int = 0, last: int = 2**62
) -> Iterator[tuple[int, RecordRow]]:
    """Records first ≤ number < last of a series, from any connection. Raises sqlite3.DatabaseError."""
    return _rows(db, series, first, last, decode_row)


def read_heads(
    db: sqlite3.Connection, series: int, first: int, last: int
) -> Iterator[tuple[int, RecordHead]]:
    """The first fields of the same records; a fraction of the cost of their rows."""
    return _rows(db, series, first, last, decode_head)


class _Column(msgspec.Struct, array_like=True, gc=False):
    """Shape and moment of a RecordRow, the latter as a plain tuple."""

    client: msgspec.Raw
    sequence: msgspec.Raw
    shape: tuple[int, ...]
    nbytes: msgspec.Raw
    moment: tuple[Any, ...]


_decode_column = msgspec.msgpack.Decoder(_Column).decode


def read_columns(db: sqlite3.Connection, series: int, first: int, last: int) -> list[ColumnRow]:
    """Moments and shapes of the same records; half the cost of their heads."""
    bodies = db.execute(
        "SELECT body FROM records WHERE series=? AND record>=? AND record<? ORDER BY record",
        (series, first, last),
    )
    try:
        return [(*found.moment, found.shape) for (body,) in bodies for found in (_decode_column(body),)]
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"the rows of series {series}: {error}") from error


def _rows(
    db: sqlite3.Connection, series: int, first: int, last: int, decode: Callable[[bytes], H]
) -> Iterator[tuple[int, H]]:
    number = before = -1
    try:
        for number, attempt, body in db.execute(_SELECT_ROWS, (series, first, last)):
            row = decode(body)
            if type(number) is not int or number <= before:
                raise msgspec.ValidationError("its number is none, or out of order")
            before = number
            if row.moment.attempt != attempt:
                raise msgspec.ValidationError(f"attempt {row.moment.attempt} is filed under {attempt}")
            yield number, row
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"record {number} of series {series}: {error}") from error


def head_of(body: bytes) -> RecordHead:
    """The first fields of a row's body. Raises sqlite3.DatabaseError."""
    try:
        return decode_head(body)
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a record's row cannot be read: {error}") from error


def read_attempts(db: sqlite3.Connection, series: int) -> tuple[int, int] | None:
    """The first and the last attempt that a series has records of, or None without records."""
    first, last = db.execute(
        "SELECT MIN(attempt), MAX(attempt) FROM records WHERE series=?", (series,)
    ).fetchone()
    return None if first is None else (first, last)


def has_attempt(db: sqlite3.Connection, attempt: int) -> set[int]:
    """Ids of the series that have a record of this attempt."""
    return {
        series for (series,) in db.execute("SELECT DISTINCT series FROM records WHERE attempt=?", (attempt,))
    }
