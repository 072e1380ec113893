"""Rows of a catalog: what they hold, and how they are read beside a live daemon."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from capd.errors import NotAStore, StoreError
from capd.store.columns import ColumnRow
from capd.store.frames import RecordHead, RecordRow, SeriesHeader, decode_head, decode_row
from capd_client.key import Key

__all__ = [
    "CATALOG_NAME",
    "CATALOG_VERSION",
    "DamagedCatalog",
    "LedgerRow",
    "SeriesRow",
    "SessionRow",
    "check_version",
    "connect_read_only",
    "has_attempt",
    "head_of",
    "read_acked",
    "read_attempts",
    "read_captures",
    "read_columns",
    "read_heads",
    "read_records",
    "read_series",
    "read_sessions",
]

CATALOG_NAME = "catalog.sqlite"
CATALOG_VERSION = 1
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
    """Counters of one rank's session. state: "live", "ended" (left in order) or "died"."""

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


class DamagedCatalog(StoreError):
    """The file is no SQLite database any more; the shards' journals still hold what it held."""


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a catalog for reading beside a live daemon; raises StoreError with the reason if that fails,
    DamagedCatalog where the file itself is the reason."""
    for options in ("mode=ro", "mode=ro&immutable=1"):  # immutable: a read-only medium without a -shm file
        try:
            db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, check_same_thread=False)
        except sqlite3.DatabaseError as error:
            reason = error
            continue
        try:
            check_version(db.execute("PRAGMA user_version").fetchone()[0], path)
        except sqlite3.DatabaseError as error:
            db.close()
            reason = error
        except BaseException:
            db.close()
            raise
        else:
            return db
    kind = StoreError if isinstance(reason, sqlite3.OperationalError) else DamagedCatalog
    raise kind(f"cannot read the catalog {path}: {reason}; start `capd serve` on the store to rebuild it")


def check_version(version: int, path: Path) -> None:
    """Raise NotAStore for a catalog that a newer capd wrote."""
    if version > CATALOG_VERSION:
        raise NotAStore(
            f"{path} has catalog version {version}, this capd reads up to {CATALOG_VERSION}; upgrade capd"
        )


_SELECT_SERIES = "SELECT id, header, records, sealed, sealing, max_shape, raw_bytes, stored_bytes FROM series"
_decode_header = msgspec.msgpack.Decoder(SeriesHeader).decode


def _series_row(row: tuple[Any, ...]) -> SeriesRow:
    identity, header, records, sealed, sealing, max_shape, raw, stored = row
    shape = tuple(json.loads(max_shape))
    return SeriesRow(identity, _decode_header(header), records, sealed, bool(sealing), shape, raw, stored)


def read_series(db: sqlite3.Connection) -> list[SeriesRow]:
    """All series of a catalog opened with connect_read_only."""
    return [_series_row(row) for row in db.execute(_SELECT_SERIES)]


def read_captures(database: sqlite3.Connection) -> Iterator[tuple[bytes, int]]:
    """Client and sequence of every record."""
    for (body,) in database.execute("SELECT body FROM records"):
        head = head_of(body)
        yield head.client, head.sequence


def read_acked(db: sqlite3.Connection) -> dict[bytes, list[tuple[int, int]]]:
    """Committed sequence ranges per client uuid."""
    decode = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
    return {client: decode(ranges) for client, ranges in db.execute("SELECT * FROM acked")}


def read_sessions(db: sqlite3.Connection) -> list[SessionRow]:
    """All sessions of a catalog opened with connect_read_only."""
    return list(_sessions(db))


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
    number = -1
    try:
        for number, attempt, body in db.execute(_SELECT_ROWS, (series, first, last)):
            row = decode(body)
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


_decode_session = msgspec.msgpack.Decoder(SessionRow).decode


def _sessions(db: sqlite3.Connection) -> Iterator[SessionRow]:
    for (body,) in db.execute("SELECT body FROM sessions"):
        yield _decode_session(body)
