"""The catalog of one node's part of a run: SQLite rows derived from COMMIT frames, for queries.

Tables: `series` (one row per Zarr array, with running totals), `records` (one row per record), `exponents`
(sparse exponent histograms), `acked` (committed sequence ranges per client), `sessions` and `drops` (the
ranks' counters). Rows are written in batches, each one transaction; the truth stands in the shard files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import NotAStore, StoreError, StoreFull
from capd.store.frames import RecordRow, SeriesHeader, StatsRow
from capd_client.key import Key, Moment

__all__ = [
    "CATALOG_NAME", "Catalog", "LedgerRow", "SeriesRow", "SessionRow", "connect_read_only",
    "read_acked", "read_records", "read_series", "read_sessions",
]  # fmt: skip

CATALOG_NAME = "catalog.sqlite"
_VERSION = 1
_KEY_FIELDS = Key.__struct_fields__
_MOMENT_FIELDS = Moment.__struct_fields__
_STATS_FIELDS = StatsRow.__struct_fields__[:-1]  # the histogram has its own table
_RECORD_FIELDS = (
    "series", "record", "client", "sequence", "shape", "nbytes", "stored_nbytes",
    *_MOMENT_FIELDS, "device", "requires_grad", "is_leaf", "metadata", "attributes", *_STATS_FIELDS,
)  # fmt: skip

_SCHEMA = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE series (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, {", ".join(_KEY_FIELDS)}, dtype TEXT NOT NULL,
  header BLOB NOT NULL, records INTEGER NOT NULL DEFAULT 0, sealed INTEGER NOT NULL DEFAULT 0,
  sealing INTEGER NOT NULL DEFAULT 0, max_shape TEXT NOT NULL DEFAULT '[]', raw_bytes INTEGER NOT NULL DEFAULT 0,
  stored_bytes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records ({", ".join(_RECORD_FIELDS)}, PRIMARY KEY (series, record)) WITHOUT ROWID;
CREATE TABLE exponents (series INTEGER, record INTEGER, bins BLOB, PRIMARY KEY (series, record)) WITHOUT ROWID;
CREATE TABLE acked (client BLOB PRIMARY KEY, ranges BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (client BLOB PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
"""


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
        """Whether the counters are final; those of a session cut off by the daemon's death are not."""
        return self.state != "live"


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


class Catalog:
    """Read-write access to one catalog; owned by the append thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the catalog.

        Raises sqlite3.DatabaseError if the file is damaged, StoreError (retry) if it is locked or the disk is
        full, NotAStore if it is newer.
        """
        self.path = path
        if not path.exists():  # sqlite would follow the umask
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            with self._guard():
                self._db.execute("PRAGMA journal_mode=WAL")
                version = self._db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
            _check_version(version, path)
        except BaseException:
            self._db.close()
            raise

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn what passes (a lock, a full disk) into StoreError; damage stays sqlite3.DatabaseError."""
        try:
            yield
        except sqlite3.OperationalError as error:
            full = "full" in str(error)
            raise (StoreFull if full else StoreError)(f"catalog {self.path}: {error}", retry=True) from error

    @property
    def is_complete(self) -> bool:
        """Whether everything that stood in the frames when it was made has been read into it."""
        with self._guard():
            return self._db.execute("SELECT 1 FROM meta WHERE name='complete'").fetchone() is not None

    def clear(self) -> None:
        """Forget series, records and acknowledged ranges (not the sessions), to read the frames again."""
        with self._guard():
            self._db.executescript(
                "BEGIN; DELETE FROM series; DELETE FROM records; DELETE FROM exponents; DELETE FROM acked; COMMIT;"
            )

    def mark_complete(self) -> None:
        """Say that the frames have been read."""
        with self._guard():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('complete', '1')")

    def abandon(self) -> None:
        """Close without touching the file any more."""
        self._db.close()

    def close(self) -> None:
        """Fold the write-ahead log into the file and close.

        Without a reader at work the file leaves WAL mode, so that reading a finished store creates no files.
        """
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()

    def series(self) -> list[SeriesRow]:
        """All series."""
        return [_series_row(row) for row in self._db.execute(_SELECT_SERIES)]

    def add_series(self, header: SeriesHeader) -> int:
        """Insert a series without records; returns its id."""
        columns = ("path", *_KEY_FIELDS, "dtype", "header")
        values = (header.path, *(getattr(header.key, name) for name in _KEY_FIELDS), header.dtype)
        marks = ", ".join("?" * len(columns))
        with self._guard():
            cursor = self._db.execute(
                f"INSERT INTO series ({', '.join(columns)}) VALUES ({marks})",  # noqa: S608 - names are constants
                (*values, msgspec.msgpack.encode(header)),
            )
        return int(cursor.lastrowid or 0)

    def write(
        self,
        records: list[tuple[int, int, RecordRow, int]],
        totals: Iterable[SeriesRow],
        acked: dict[bytes, list[tuple[int, int]]],
        *,
        durable: bool = False,
    ) -> None:
        """One transaction: (series id, record, row, stored bytes) rows, series totals and acknowledged ranges.

        durable: it must be on disk when this returns, because a rename that follows relies on it.
        """
        with self._guard():
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._write(records, totals, acked)
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def _write(
        self,
        records: list[tuple[int, int, RecordRow, int]],
        totals: Iterable[SeriesRow],
        acked: dict[bytes, list[tuple[int, int]]],
    ) -> None:
        self._db.executemany(_INSERT_RECORD, (_record_values(*record) for record in records))
        self._db.executemany(
            "INSERT OR REPLACE INTO exponents VALUES (?, ?, ?)",
            (
                (series, number, msgspec.msgpack.encode(row.stats.exponents))
                for series, number, row, _ in records
                if row.stats is not None
            ),
        )
        self._db.executemany(
            "UPDATE series SET records=?, sealed=?, sealing=?, max_shape=?, raw_bytes=?, stored_bytes=? WHERE id=?",
            (
                (t.records, t.sealed, t.sealing, json.dumps(t.max_shape), t.raw_bytes, t.stored_bytes, t.id)
                for t in totals
            ),
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO acked VALUES (?, ?)",
            ((client, msgspec.msgpack.encode(ranges)) for client, ranges in acked.items()),
        )

    def forget_from(self, row: SeriesRow, first: int) -> None:
        """Delete the rows of records `first` and later, and bring the series' totals in `row` in line."""
        with self._guard():
            for table in ("records", "exponents"):
                self._db.execute(f"DELETE FROM {table} WHERE series=? AND record>=?", (row.id, first))  # noqa: S608
            raw, stored = self._db.execute(
                "SELECT TOTAL(nbytes), TOTAL(stored_nbytes) FROM records WHERE series=?", (row.id,)
            ).fetchone()
        row.records, row.raw_bytes, row.stored_bytes = first, int(raw), int(stored)

    def rows(self, series: int, first: int, last: int) -> Iterator[tuple[int, RecordRow]]:
        """Records first ≤ number < last of a series, without histograms."""
        yield from _rows(self._db, series, first, last)

    def acked(self) -> dict[bytes, list[tuple[int, int]]]:
        """Committed sequence ranges per client uuid."""
        return read_acked(self._db)

    def save_session(self, row: SessionRow) -> None:
        """Insert or replace the counters of a session."""
        with self._guard():
            self._db.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?)", (row.client, msgspec.msgpack.encode(row))
            )


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a catalog for reading beside a live daemon; raises StoreError with the reason if that fails."""
    for options in ("mode=ro", "mode=ro&immutable=1"):  # immutable: a read-only medium without a -shm file
        try:
            db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, check_same_thread=False)
            version = db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            reason = error
            continue
        _check_version(version, path)
        return db
    raise StoreError(
        f"cannot read the catalog {path}: {reason}; start `capd serve` on the store to rebuild it"
    )


def _check_version(version: int, path: Path) -> None:
    if version > _VERSION:
        raise NotAStore(
            f"{path} has catalog version {version}, this capd reads up to {_VERSION}; upgrade capd"
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


def read_acked(db: sqlite3.Connection) -> dict[bytes, list[tuple[int, int]]]:
    """Committed sequence ranges per client uuid."""
    decode = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
    return {client: decode(ranges) for client, ranges in db.execute("SELECT * FROM acked")}


def read_sessions(db: sqlite3.Connection) -> list[SessionRow]:
    """All sessions of a catalog opened with connect_read_only."""
    return list(_sessions(db))


def read_records(db: sqlite3.Connection, series: int) -> Iterator[tuple[int, RecordRow]]:
    """All records of a series with their histograms, from a catalog opened with connect_read_only."""
    decode = msgspec.msgpack.Decoder(list[int]).decode
    bins = dict(db.execute("SELECT record, bins FROM exponents WHERE series=?", (series,)))
    for number, row in _rows(db, series, 0, 2**62):
        if row.stats is not None and number in bins:
            row.stats.exponents = decode(bins[number])
        yield number, row


_INSERT_RECORD = (
    f"INSERT OR REPLACE INTO records ({', '.join(_RECORD_FIELDS)}) "  # noqa: S608 - names are constants
    f"VALUES ({', '.join('?' * len(_RECORD_FIELDS))})"
)
_SELECT_RECORDS = (
    f"SELECT {', '.join(_RECORD_FIELDS)} FROM records "  # noqa: S608 - names are constants
    "WHERE series=? AND record>=? AND record<? ORDER BY record"
)
_LARGEST = 2**63 - 1


def _record_values(series: int, number: int, row: RecordRow, stored_nbytes: int) -> tuple[Any, ...]:
    stats: list[Any] = [None] * len(_STATS_FIELDS)
    if row.stats is not None:
        stats = [getattr(row.stats, name) for name in _STATS_FIELDS]
        # uint64 reaches beyond SQLite's integers
        stats = [float(v) if isinstance(v, int) and v > _LARGEST else v for v in stats]
    return (
        series, number, row.client, row.sequence, json.dumps(row.shape), row.nbytes, stored_nbytes,
        *(getattr(row.moment, name) for name in _MOMENT_FIELDS),
        row.device, row.requires_grad, row.is_leaf, row.metadata, row.attributes, *stats,
    )  # fmt: skip


def _rows(db: sqlite3.Connection, series: int, first: int, last: int) -> Iterator[tuple[int, RecordRow]]:
    moments, stats_at = 7, 7 + len(_MOMENT_FIELDS) + 5
    for v in db.execute(_SELECT_RECORDS, (series, first, last)):
        stats = None if v[stats_at] is None else StatsRow(*v[stats_at:-2], *map(_nan, v[-2:]))
        moment = msgspec.convert(v[moments : moments + len(_MOMENT_FIELDS)], Moment, strict=False)
        device, requires_grad, is_leaf, metadata, attributes = v[stats_at - 5 : stats_at]
        yield (
            v[1],
            RecordRow(
                v[2], v[3], tuple(json.loads(v[4])), v[5], moment, device, bool(requires_grad), bool(is_leaf),
                metadata, attributes, stats,
            ),
        )  # fmt: skip


def _nan(number: float | None) -> float:
    return math.nan if number is None else number  # SQLite has no NaN and keeps NULL for it


_decode_session = msgspec.msgpack.Decoder(SessionRow).decode


def _sessions(db: sqlite3.Connection) -> Iterator[SessionRow]:
    for (body,) in db.execute("SELECT body FROM sessions"):
        yield _decode_session(body)
