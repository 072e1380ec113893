"""The catalog of one node's part of a run: SQLite rows for queries, derived from COMMIT frames.

The tables are:

- `series`: one row per Zarr array, with running totals
- `records`: one row per record; its body is the one of the COMMIT frame
- `acked`: committed sequence ranges per client
- `sessions`: the ranks' counters

Rows are written in batches, each in one transaction. The authoritative copy is in the shard files.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import msgspec

from capd.errors import StoreError
from capd.space import full_database, if_full
from capd.store.catalog.file import guarded, open_file
from capd.store.catalog.place import CatalogPlace
from capd.store.catalog.rows import (
    SeriesRow,
    SessionRow,
    read_acked,
    read_captures,
    read_columns,
    read_heads,
    read_records,
    read_series,
)
from capd.store.format.columns import ColumnRow
from capd.store.format.frames import RecordRow, SeriesHeader, encode_row
from capd.store.format.ranges import RangeSet
from capd_client.protocol.key import MAX_INDEX, Key

__all__ = ["Catalog", "NewRow", "new_row"]

_PUBLISH_INTERVAL_S = 10.0
# Snapshots take at most a twentieth of the append thread's time.
_PUBLISH_SHARE = 20.0
_KEY_FIELDS = Key.__struct_fields__

# A row of `records`: series id, record, attempt, stored bytes, and the RecordRow as its COMMIT frame holds it.
NewRow: TypeAlias = tuple[int, int, int, int, bytes]


def new_row(series: int, record: int, row: RecordRow, stored_nbytes: int) -> NewRow:
    """Return the catalog row of a record that is not encoded yet."""
    return (series, record, row.moment.attempt, stored_nbytes, encode_row(row))


class Catalog:
    """Read-write access to one catalog; owned by the append thread.

    Attributes:
        path: The file of the catalog.
        was_closed: Whether the previous writer closed the catalog in order.
    """

    def __init__(self, path: Path, place: CatalogPlace | None = None) -> None:
        """Open or create the catalog.

        Args:
            path: The file of the catalog.
            place: The place where snapshots are published; None if the catalog is in the store itself.

        Raises:
            sqlite3.DatabaseError: The file is damaged.
            StoreError: The file is locked or the disk is full (retry).
            NotAStore: A newer capd wrote the file.
        """
        self.path = path
        self._place = place
        self._publish_at = 0.0
        self._unpublished = True
        self._db, self.was_closed = open_file(path)

    def _guard(self) -> AbstractContextManager[None]:
        return guarded(self._db, self.path)

    @property
    def is_complete(self) -> bool:
        """Whether all frames that existed when the catalog was created have been read into it."""
        with self._guard():
            return self._db.execute("SELECT 1 FROM meta WHERE name='complete'").fetchone() is not None

    def clear(self) -> None:
        """Delete series, records and acknowledged ranges, but not the sessions. The frames can then be read again."""
        with self._guard():
            self._db.executescript(
                "BEGIN; DELETE FROM series; DELETE FROM records; DELETE FROM acked; COMMIT;"
            )

    @property
    def mounted(self) -> str:
        """The mount (`capd.store.disk.power`) under which the files were last known to be intact."""
        with self._guard():
            found = self._db.execute("SELECT value FROM meta WHERE name='mounted'").fetchone()
        return "" if found is None else str(found[0])

    def mark_complete(self, mounted: str) -> None:
        """Record that the frames have been read, and under which mount."""
        with self._guard():
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("complete", "1"), ("mounted", mounted)]
            )

    def mark_incomplete(self) -> None:
        """Record that the frames have to be read."""
        with self._guard():
            self._db.execute("DELETE FROM meta WHERE name='complete'")

    def distrust(self) -> None:
        """Record that the disk lost writes.

        The next start then makes the checks that are otherwise necessary only after a power loss.
        """
        with self._guard():
            self._db.execute("DELETE FROM meta WHERE name='mounted'")

    def abandon(self) -> None:
        """Close without changing the file any more."""
        self._db.close()

    def publish(self) -> None:
        """Publish a snapshot if the catalog is not in the store itself. Raises StoreError (retry)."""
        if self._place is None:
            return
        began = time.monotonic()
        try:
            self._place.publish(self._db)
        except (OSError, sqlite3.Error) as error:
            why: object = if_full(error, self._place.published)
            if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                # The live catalog and the store may be on different file systems.
                why = full_database(self._place.live)
            raise StoreError(f"catalog {self._place.published}: {why}", retry=True) from error
        self._unpublished = False
        now = time.monotonic()
        self._publish_at = now + max(_PUBLISH_INTERVAL_S, _PUBLISH_SHARE * (now - began))

    def publish_if_due(self) -> None:
        """Publish a snapshot if enough time has passed. A larger catalog is published less often."""
        if self._unpublished and time.monotonic() >= self._publish_at:
            self.publish()

    def close(self) -> None:
        """Checkpoint the write-ahead log and close. A catalog outside the store is published and removed.

        If no reader is active, the file leaves WAL mode. Reading a finished store then creates no files.
        """
        try:
            self.publish()
        finally:
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode=DELETE")
            self._db.close()
        if self._place is not None:
            self._place.discard()

    def series(self) -> list[SeriesRow]:
        """Return all series."""
        return read_series(self._db)

    def add_series(self, header: SeriesHeader) -> int:
        """Insert a series without records. Return its id."""
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
        records: Sequence[NewRow],
        totals: Iterable[SeriesRow],
        acked: dict[bytes, list[tuple[int, int]]],
        moved: Iterable[tuple[int, int, int, int]] = (),
        *,
        durable: bool = False,
    ) -> None:
        """Write record rows, series totals and acknowledged ranges in one transaction.

        Args:
            records: The new record rows.
            totals: The series with new totals.
            acked: The acknowledged ranges of each changed client.
            moved: Small records that are in a shard now: (series id, first, end, stored bytes of each).
            durable: Whether the transaction must be on disk on return, because a subsequent rename depends on it.
        """
        with self._guard():
            self._unpublished = True
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            # The rows of a series are adjacent in the table.
            together = sorted(records, key=itemgetter(0))
            with self._transaction():
                self._db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", together)
                self._db.executemany(
                    "UPDATE records SET stored_nbytes=? WHERE series=? AND record>=? AND record<?",
                    ((stored, series, first, end) for series, first, end, stored in moved),
                )
                self._db.executemany(
                    "UPDATE series SET records=?, sealed=?, sealing=?, max_shape=?, raw_bytes=?, stored_bytes=? "
                    "WHERE id=?",
                    (
                        (
                            t.records,
                            t.sealed,
                            t.sealing,
                            _shape_text(t.max_shape),
                            t.raw_bytes,
                            t.stored_bytes,
                            t.id,
                        )
                        for t in totals
                    ),
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO acked VALUES (?, ?)",
                    ((client, msgspec.msgpack.encode(ranges)) for client, ranges in acked.items()),
                )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def sequences(self) -> Iterator[tuple[bytes, int]]:
        """Yield client and sequence of every record."""
        return read_captures(self._db)

    def forget_from(self, row: SeriesRow, first: int) -> None:
        """Delete the rows of records `first` and later, and correct the series' totals in `row`.

        The catalog counts as incomplete until `mark_complete`, because acknowledged ranges still include the deleted
        records.
        """
        with self._guard(), self._transaction():
            self.mark_incomplete()
            self._db.execute("DELETE FROM records WHERE series=? AND record>=?", (row.id, first))
            (stored,) = self._db.execute(
                "SELECT TOTAL(stored_nbytes) FROM records WHERE series=?", (row.id,)
            ).fetchone()
            row.raw_bytes, row.max_shape = 0, ()
            for _, head in read_heads(self._db, row.id, 0, first):
                row.raw_bytes += head.nbytes
                row.max_shape = tuple(map(max, row.max_shape or head.shape, head.shape))
        row.records, row.stored_bytes = first, int(stored)

    def remove_series(self, paths: Iterable[str]) -> None:
        """Delete series with their records, in one transaction. Their captures are no longer acknowledged ones.

        The catalog then equals one that is built again from the frames of the other series. A path without a series is
        ignored.
        """
        with self._guard(), self._transaction():
            self._unpublished = True
            gone: dict[bytes, set[int]] = {}
            for path in paths:
                for (identity,) in self._db.execute("SELECT id FROM series WHERE path=?", (path,)).fetchall():
                    for _, head in read_heads(self._db, identity, 0, MAX_INDEX):
                        gone.setdefault(head.client, set()).add(head.sequence)
                    self._db.execute("DELETE FROM records WHERE series=?", (identity,))
                    self._db.execute("DELETE FROM series WHERE id=?", (identity,))
            acked = read_acked(self._db)
            for client in gone.keys() & acked.keys():
                kept = RangeSet(acked[client]).without(gone[client])
                self._db.execute(
                    "INSERT OR REPLACE INTO acked VALUES (?, ?)", (client, msgspec.msgpack.encode(kept))
                )

    def rows(self, series: int, first: int, last: int) -> Iterator[tuple[int, RecordRow]]:
        """Yield the records first ≤ number < last of a series."""
        return read_records(self._db, series, first, last)

    def columns(self, series: int, first: int, last: int) -> list[ColumnRow]:
        """Return the moments and shapes of records first ≤ number < last of a series."""
        with self._guard():
            return read_columns(self._db, series, first, last)

    def stored(self, series: int, first: int, last: int) -> dict[int, tuple[bytes, int, int]]:
        """Return client, sequence and stored bytes of records first ≤ number < last of a series."""
        sizes = dict(
            self._db.execute(
                "SELECT record, stored_nbytes FROM records WHERE series=? AND record>=? AND record<?",
                (series, first, last),
            )
        )
        heads = read_heads(self._db, series, first, last)
        return {number: (head.client, head.sequence, sizes[number]) for number, head in heads}

    def acked(self) -> dict[bytes, list[tuple[int, int]]]:
        """Return the committed sequence ranges of each client uuid."""
        return read_acked(self._db)

    def save_session(self, row: SessionRow) -> None:
        """Insert or replace the counters of a session."""
        with self._guard():
            self._unpublished = True
            self._db.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?)", (row.client, msgspec.msgpack.encode(row))
            )


@lru_cache(4096)
def _shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape in the form of the catalog."""
    return json.dumps(shape)
