"""The file of a catalog: opened or created with its tables, and told apart from one that a kill or a disk damaged."""

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

_CACHE_KIB = 8192  # a transaction changes the last pages of thousands of series


def open_file(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Open or create the catalog; with it, whether whoever wrote it before closed it in order.

    Raises sqlite3.DatabaseError if the file is damaged, StoreError (retry) if it is locked or the disk is full,
    NotAStore if it is newer.
    """
    if not path.exists():  # sqlite would follow the umask
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    was_closed = _is_folded(path)
    if _is_cut(path):
        raise sqlite3.DatabaseError("the file is shorter than its header says")
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        with guarded(db, path):
            version = db.execute("PRAGMA user_version").fetchone()[0]
            check_version(version, path)  # a newer capd's file is not touched
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
    """The tables are not those that capd makes: nothing may be written, a trigger would run."""


@contextlib.contextmanager
def guarded(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Turn what passes (a lock, a full disk) into StoreError; damage stays sqlite3.DatabaseError, and the next
    start makes the catalog anew."""
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
    """Whether the file stands for itself: no part of it is, or was, in a write-ahead log beside it."""
    with path.open("rb") as file:
        return file.read(20)[18:] != b"\x02\x02"  # the read and write versions of the SQLite file format


def _is_cut(path: Path) -> bool:
    """Whether the end of the file is missing; SQLite notices when it needs a page from there. Pages may stand in a
    write-ahead log instead."""
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        return False
    with path.open("rb") as file:
        header = file.read(100)
    is_valid = len(header) == 100 and header[24:28] == header[92:96]  # the size is of the last change
    page_nbytes = int.from_bytes(header[16:18], "big")  # 1: 65,536
    pages = int.from_bytes(header[28:32], "big")
    return is_valid and pages * (page_nbytes if page_nbytes > 1 else 1 << 16) > path.stat().st_size
