"""The catalog of one node's part of a run: SQLite rows derived from COMMIT frames, for queries.

Tables: `series` (one row per Zarr array, with running totals), `records` (one row per record, its body as in the
COMMIT frame), `acked` (committed sequence ranges per client) and `sessions` (the ranks' counters). Rows are
written in batches, each one transaction; the truth stands in the shard files.
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
from capd_client.protocol.key import Key

__all__ = ["Catalog", "NewRow", "new_row"]

_PUBLISH_INTERVAL_S = 10.0
_PUBLISH_SHARE = 20.0  # at most a twentieth of the append thread's time goes into snapshots
_KEY_FIELDS = Key.__struct_fields__

# A row of `records`: series id, record, attempt, stored bytes, and the RecordRow as its COMMIT frame holds it.
NewRow: TypeAlias = tuple[int, int, int, int, bytes]


def new_row(series: int, record: int, row: RecordRow, stored_nbytes: int) -> NewRow:
    """The row of a record that is not encoded yet."""
    return (series, record, row.moment.attempt, stored_nbytes, encode_row(row))


class Catalog:
    """Read-write access to one catalog; owned by the append thread."""

    def __init__(self, path: Path, place: CatalogPlace | None = None) -> None:
        """Open or create the catalog. place: given when it lies apart from the store and is published there.

        `was_closed` then tells whether whoever wrote it before closed it in order.

        Raises sqlite3.DatabaseError if the file is damaged, StoreError (retry) if it is locked or the disk is
        full, NotAStore if it is newer.
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
        """Whether everything that stood in the frames when it was made has been read into it."""
        with self._guard():
            return self._db.execute("SELECT 1 FROM meta WHERE name='complete'").fetchone() is not None

    def clear(self) -> None:
        """Forget series, records and acknowledged ranges (not the sessions), to read the frames again."""
        with self._guard():
            self._db.executescript(
                "BEGIN; DELETE FROM series; DELETE FROM records; DELETE FROM acked; COMMIT;"
            )

    @property
    def mounted(self) -> str:
        """Under which mount (`capd.store.disk.power`) the files were last known to be whole."""
        with self._guard():
            found = self._db.execute("SELECT value FROM meta WHERE name='mounted'").fetchone()
        return "" if found is None else str(found[0])

    def mark_complete(self, mounted: str) -> None:
        """Say that the frames have been read, and under which mount."""
        with self._guard():
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("complete", "1"), ("mounted", mounted)]
            )

    def mark_incomplete(self) -> None:
        """Say that the frames have to be read."""
        with self._guard():
            self._db.execute("DELETE FROM meta WHERE name='complete'")

    def distrust(self) -> None:
        """Say that the disk lost writes: the next start checks what only a loss of power damages otherwise."""
        with self._guard():
            self._db.execute("DELETE FROM meta WHERE name='mounted'")

    def abandon(self) -> None:
        """Close without touching the file any more."""
        self._db.close()

    def publish(self) -> None:
        """Where the catalog lies apart: let readers see what it holds now. Raises StoreError (retry)."""
        if self._place is None:
            return
        began = time.monotonic()
        try:
            self._place.publish(self._db)
        except (OSError, sqlite3.Error) as error:
            why: object = if_full(error, self._place.published)
            if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                why = full_database(self._place.live)  # whose file system need not be the store's
            raise StoreError(f"catalog {self._place.published}: {why}", retry=True) from error
        self._unpublished = False
        now = time.monotonic()
        self._publish_at = now + max(_PUBLISH_INTERVAL_S, _PUBLISH_SHARE * (now - began))

    def publish_if_due(self) -> None:
        """`publish` now and then; the larger the catalog, the more rarely."""
        if self._unpublished and time.monotonic() >= self._publish_at:
            self.publish()

    def close(self) -> None:
        """Fold the write-ahead log into the file and close; one that lies apart is published and removed.

        Without a reader at work the file leaves WAL mode, so that reading a finished store creates no files.
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
        """All series."""
        return read_series(self._db)

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
        records: Sequence[NewRow],
        totals: Iterable[SeriesRow],
        acked: dict[bytes, list[tuple[int, int]]],
        moved: Iterable[tuple[int, int, int, int]] = (),
        *,
        durable: bool = False,
    ) -> None:
        """One transaction: record rows, series totals and acknowledged ranges.

        moved: (series id, first, end, stored bytes) of small records that stand in a shard now; bytes of each.
        durable: it must be on disk when this returns, because a rename that follows relies on it.
        """
        with self._guard():
            self._unpublished = True
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            with self._transaction():
                self._write(records, totals, acked, moved)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _write(
        self,
        records: Sequence[NewRow],
        totals: Iterable[SeriesRow],
        acked: dict[bytes, list[tuple[int, int]]],
        moved: Iterable[tuple[int, int, int, int]],
    ) -> None:
        together = sorted(records, key=itemgetter(0))  # a series' rows lie side by side
        self._db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", together)
        self._db.executemany(
            "UPDATE records SET stored_nbytes=? WHERE series=? AND record>=? AND record<?",
            ((stored, series, first, end) for series, first, end, stored in moved),
        )
        self._db.executemany(
            "UPDATE series SET records=?, sealed=?, sealing=?, max_shape=?, raw_bytes=?, stored_bytes=? WHERE id=?",
            (
                (t.records, t.sealed, t.sealing, _shape_text(t.max_shape), t.raw_bytes, t.stored_bytes, t.id)
                for t in totals
            ),
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO acked VALUES (?, ?)",
            ((client, msgspec.msgpack.encode(ranges)) for client, ranges in acked.items()),
        )

    def sequences(self) -> Iterator[tuple[bytes, int]]:
        """Client and sequence of every record."""
        return read_captures(self._db)

    def forget_from(self, row: SeriesRow, first: int) -> None:
        """Delete the rows of records `first` and later, and bring the series' totals in `row` in line.

        Until `mark_complete` the catalog counts as incomplete: totals and acknowledged ranges still tell of them.
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

    def rows(self, series: int, first: int, last: int) -> Iterator[tuple[int, RecordRow]]:
        """Records first ≤ number < last of a series."""
        return read_records(self._db, series, first, last)

    def columns(self, series: int, first: int, last: int) -> list[ColumnRow]:
        """Moments and shapes of records first ≤ number < last of a series."""
        with self._guard():
            return read_columns(self._db, series, first, last)

    def stored(self, series: int, first: int, last: int) -> dict[int, tuple[bytes, int, int]]:
        """Client, sequence and stored bytes of records first ≤ number < last of a series."""
        sizes = dict(
            self._db.execute(
                "SELECT record, stored_nbytes FROM records WHERE series=? AND record>=? AND record<?",
                (series, first, last),
            )
        )
        heads = read_heads(self._db, series, first, last)
        return {number: (head.client, head.sequence, sizes[number]) for number, head in heads}

    def acked(self) -> dict[bytes, list[tuple[int, int]]]:
        """Committed sequence ranges per client uuid."""
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
    """A shape as the catalog keeps it."""
    return json.dumps(shape)
