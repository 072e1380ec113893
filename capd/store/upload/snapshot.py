"""A snapshot of a catalog for an upload: one transaction, so that series, sessions and records belong together."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capd.errors import StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, SessionRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.disk.layout import PARTIAL_GLOB

__all__ = ["CatalogSnapshot", "catalog_snapshot"]

_SELECT = "SELECT record, stored_nbytes, body FROM records WHERE series=? AND record>=? AND record<? ORDER BY record"


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The rows of one moment. Use it within `catalog_snapshot` alone.

    Attributes:
        series: All series.
        sessions: All sessions.
        is_complete: Whether nobody captures, and every record is in a sealed shard.
    """

    series: list[SeriesRow]
    sessions: list[SessionRow]
    is_complete: bool
    _database: sqlite3.Connection

    def records(self, series: int, first: int, last: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, stored bytes and body of the records first ≤ number < last of a series.

        Raises:
            StoreError: A record is missing, or a row is not valid.
        """
        expected = first
        for number, stored, body in self._database.execute(_SELECT, (series, first, last)):
            if number != expected or type(stored) is not int or not isinstance(body, bytes):
                break
            yield number, stored, body
            expected += 1
        if expected != last:
            raise StoreError(
                f"the catalog lacks record {expected} of series {series}; `capd verify --repair` says what can be saved"
            )


@contextlib.contextmanager
def catalog_snapshot(directory: Path) -> Iterator[CatalogSnapshot]:
    """Open the catalog in the directory of a node for some statements.

    Raises:
        StoreError: It cannot be read.
    """
    spool = directory / "spool"
    # Before the catalog: a shard that leaves the spool was written to the catalog first.
    is_empty = not any(spool.glob(PARTIAL_GLOB))
    try:
        with contextlib.closing(connect_read_only(directory / CATALOG_NAME)) as database:
            database.execute("BEGIN")
            series, sessions = read_series(database), read_sessions(database)
            is_sealed = all(row.sealed == row.records for row in series)
            is_quiet = all(session.state != "live" for session in sessions)
            yield CatalogSnapshot(series, sessions, is_empty and is_sealed and is_quiet, database)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"catalog {directory / CATALOG_NAME}: {error}", retry=True) from error
    except FileNotFoundError as error:
        raise StoreError(f"{error.filename} is gone; the next round looks again", retry=True) from error
