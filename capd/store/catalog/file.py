"""The file of a catalog: it is opened or created with its tables, and damage by a kill or a disk is detected."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from capd.errors import StoreError, StoreFull
from capd.space import full_database
from capd.store.catalog.opening import CATALOG_VERSION, SCHEMA, check_version, distrust_schema, schema_problem

__all__ = ["guarded", "open_file"]

# A transaction changes the last pages of thousands of series.
_CACHE_KIB = 8192


def open_file(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Open or create the catalog.

    Returns:
        The connection, and whether the previous writer closed the catalog in order.

    Raises:
        sqlite3.DatabaseError: The file is damaged.
        StoreError: The file is locked or the disk is full (retry).
        NotAStore: A newer capd wrote the file.
    """
    # SQLite would create the file with the mode of the umask.
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    was_closed = _is_folded(path)
    if _is_cut(path):
        raise sqlite3.DatabaseError("the file is shorter than its header says")
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        with guarded(db, path):
            version = db.execute("PRAGMA user_version").fetchone()[0]
            # The file of a newer capd is not changed.
            check_version(version, path)
            distrust_schema(db)
            problem = schema_problem(db)
            if problem:
                raise _Strange(problem)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA cache_size={-_CACHE_KIB}")
            if problem is not None:
                db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={CATALOG_VERSION}; COMMIT;")
    except _Strange as strange:
        db.close()
        raise sqlite3.DatabaseError(str(strange)) from None
    except BaseException:
        db.close()
        raise
    return db, was_closed


class _Strange(Exception):
    """The tables differ from those of capd. Nothing may be written, because a trigger would run."""


@contextlib.contextmanager
def guarded(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Convert temporary errors (a lock, a full disk) to StoreError.

    Damage remains sqlite3.DatabaseError. The next start then rebuilds the catalog.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise StoreFull(f"catalog {path}: {full_database(path)}", retry=True) from error
        raise StoreError(f"catalog {path}: {error}", retry=True) from error
    except sqlite3.DatabaseError:
        with contextlib.suppress(sqlite3.Error):
            db.execute("DELETE FROM meta WHERE name='complete'")
        raise


def _is_folded(path: Path) -> bool:
    """Return whether the file is complete: no part of it is, or was, in a write-ahead log."""
    with path.open("rb") as file:
        # Bytes 18 and 19 are the write and read versions of the SQLite file format; 2 is WAL.
        return file.read(20)[18:] != b"\x02\x02"


def _is_cut(path: Path) -> bool:
    """Return whether the end of the file is missing.

    SQLite notices that only when it needs a page from there. If a write-ahead log exists, it may hold the missing
    pages.
    """
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        return False
    with path.open("rb") as file:
        header = file.read(100)
    # If both change counters are equal, the size in the header is valid.
    is_valid = len(header) == 100 and header[24:28] == header[92:96]
    # The value 1 is 65,536 bytes.
    page_nbytes = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    return is_valid and pages * (page_nbytes if page_nbytes > 1 else 1 << 16) > path.stat().st_size
