"""Opens a catalog that may come from anybody. Every reader opens catalogs through this module.

An SQLite file can hold more than rows: views, triggers, or pages that form a circle. No query runs before the schema
equals the one of capd. The steps of each statement and the bytes of each cell are limited. Both limits grow with the
size of the file.
"""

from __future__ import annotations

import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

from capd.errors import NotAStore, StoreError
from capd_client.protocol.key import Key

__all__ = [
    "CATALOG_VERSION",
    "SCHEMA",
    "DamagedCatalog",
    "EmptyCatalog",
    "check_version",
    "connect_read_only",
    "distrust_schema",
    "regular_nbytes",
    "schema_problem",
]

CATALOG_VERSION = 1
SCHEMA = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE series (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, {", ".join(Key.__struct_fields__)}, dtype TEXT NOT NULL,
  header BLOB NOT NULL, records INTEGER NOT NULL DEFAULT 0, sealed INTEGER NOT NULL DEFAULT 0,
  sealing INTEGER NOT NULL DEFAULT 0, max_shape TEXT NOT NULL DEFAULT '[]', raw_bytes INTEGER NOT NULL DEFAULT 0,
  stored_bytes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records (
  series INTEGER, record INTEGER, attempt INTEGER NOT NULL, stored_nbytes INTEGER NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (series, record)) WITHOUT ROWID;
CREATE TABLE acked (client BLOB PRIMARY KEY, ranges BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (client BLOB PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
"""

_BESIDE = ("-wal", "-shm", "-journal")
# The steps of SQLite's virtual machine between two checks of the limit.
_CALLBACK_STEPS = 10_000
# About one second.
_MIN_STEPS = 20_000_000
# A row has about 100 bytes and takes about 20 steps.
_STEPS_PER_BYTE = 16
_MAX_CELL_NBYTES = 256 << 20
# A live catalog grows while it is read.
_MIN_CELL_NBYTES = 4 << 20

_LIMITS = (
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 100_000),
    (sqlite3.SQLITE_LIMIT_COLUMN, 100),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
    (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 10),
    (sqlite3.SQLITE_LIMIT_VDBE_OP, 25_000),
    (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 16),
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1),
    (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
)


class DamagedCatalog(StoreError):
    """The file is not a catalog of capd any more. The shards' journals still hold its content."""


class EmptyCatalog(DamagedCatalog):
    """The file has no tables: the first start of a run was killed before it created them."""


class _Bounded(sqlite3.Connection):
    """A connection that interrupts a statement after a number of steps, with sqlite3.OperationalError."""

    _left = 0
    _allowed = _MIN_STEPS

    def bound(self, nbytes: int) -> None:
        """Set the limits for a file of `nbytes`."""
        self._allowed = _MIN_STEPS + _STEPS_PER_BYTE * nbytes
        self.set_progress_handler(self._is_spent, _CALLBACK_STEPS)
        cell = min(_MAX_CELL_NBYTES, _MIN_CELL_NBYTES + nbytes)
        for limit, value in ((sqlite3.SQLITE_LIMIT_LENGTH, cell), *_LIMITS):
            self.setlimit(limit, value)

    def execute(self, *given: Any) -> sqlite3.Cursor:
        """Execute a statement with the full number of steps."""
        self._left = self._allowed
        return super().execute(*given)

    def _is_spent(self) -> bool:
        self._left -= _CALLBACK_STEPS
        return self._left < 0


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a catalog for reading. A daemon may write to it at the same time.

    Raises:
        StoreError: The catalog cannot be read. The message has the reason.
        DamagedCatalog: The file itself is the reason, or its tables differ from those of capd.
        EmptyCatalog: The catalog has no tables.
        NotAStore: A newer capd wrote the catalog.
    """
    nbytes = regular_nbytes(path)
    # `immutable` is necessary on a read-only medium without a -shm file.
    for options in ("mode=ro", "mode=ro&immutable=1"):
        try:
            db = sqlite3.connect(
                f"{path.absolute().as_uri()}?{options}", uri=True, check_same_thread=False, factory=_Bounded
            )
        except sqlite3.DatabaseError as error:
            reason = error
            continue
        try:
            _look(db, path, nbytes)
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


def _look(db: _Bounded, path: Path, nbytes: int) -> None:
    db.bound(nbytes)
    distrust_schema(db)
    db.execute("PRAGMA query_only=ON")
    db.execute("PRAGMA mmap_size=0")
    check_version(db.execute("PRAGMA user_version").fetchone()[0], path)
    if (problem := schema_problem(db)) is None:
        return
    if not problem:
        raise EmptyCatalog(f"the catalog {path} has no tables yet")
    raise DamagedCatalog(
        f"the catalog {path} does not have the schema of capd: {problem}; `capd verify --rebuild-catalog` rebuilds it"
    )


def regular_nbytes(path: Path) -> int:
    """Return the bytes of the file and of the files beside it, such as its write-ahead log.

    Raises:
        DamagedCatalog: One of them is not a regular file. SQLite would wait for a pipe.
    """
    nbytes = 0
    for place in (path, *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
        if place.is_file():
            nbytes += place.stat().st_size
        elif place.exists():
            raise DamagedCatalog(f"{place} is not a regular file")
    return nbytes


def check_version(version: int, path: Path) -> None:
    """Raise NotAStore if a newer capd wrote the catalog."""
    if version > CATALOG_VERSION:
        raise NotAStore(
            f"{path} has catalog version {version}, but this capd reads up to {CATALOG_VERSION}; upgrade capd"
        )


def distrust_schema(db: sqlite3.Connection) -> None:
    """Prevent the schema from calling functions, and check each page when it is read."""
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")


def schema_problem(db: sqlite3.Connection) -> str | None:
    """Return how the tables of a catalog differ from those of capd; None if they do not, "" if there are none."""
    found = {(kind, name): _plain(sql) for kind, name, sql in db.execute(_SELECT_SCHEMA)}
    known = _own_schema()
    if not found:
        return ""
    for kind, name in found:
        if (kind, name) not in known:
            return f"it has a {kind} {str(name)!r} that capd does not create"
    for (kind, name), sql in known.items():
        if (kind, name) not in found:
            return f"its {kind} {name!r} is missing"
        if found[kind, name] != sql:
            return f"its {kind} {name!r} has other columns"
    return None


_SELECT_SCHEMA = "SELECT type, name, sql FROM sqlite_master"


@cache
def _own_schema() -> dict[tuple[str, str], str]:
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(SCHEMA)
        return {(kind, name): _plain(sql) for kind, name, sql in db.execute(_SELECT_SCHEMA)}
    finally:
        db.close()


def _plain(sql: Any) -> str:
    """Return a definition without its line breaks; empty for the indexes that SQLite creates itself."""
    return " ".join(str(sql or "").split())
