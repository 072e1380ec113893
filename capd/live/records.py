"""The newest records of one node's part of a run, read from its live catalog while the daemon writes it."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from capd.errors import CapdError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.place import live_catalog
from capd.store.catalog.rows import CATALOG_NAME, NO_ERRORS, SeriesRow, read_records, series_row
from capd.store.disk.layout import node_directory
from capd.store.documents.headers import sound_row
from capd.store.format.frames import RecordRow
from capd.store.format.statistics import Stats, public
from capd_client.protocol.key import Key, Moment

__all__ = ["MAX_NEWEST", "NewRecord", "NewestRecords"]

MAX_NEWEST = 200
"""The most records that are listed."""
# The rows that one look reads at most, and the series that they come from.
_MAX_ROWS, _MAX_SERIES = 600, 300
_MAX_KNOWN = 4096
# A look at a large catalog takes at most a twentieth of the time.
_SHARE = 20.0
# A file that changed so recently may change again within the same tick of the file system's clock.
_SETTLED_NS = 100_000_000
_DAMAGE = (sqlite3.DatabaseError, ValueError, TypeError, ArithmeticError, RecursionError)
_PROBLEMS = (CapdError, OSError, *_DAMAGE)
_SELECT_COUNTS = f"SELECT id, records FROM series WHERE {NO_ERRORS}"  # noqa: S608 - a constant
_SELECT = (
    "SELECT id, header, records, sealed, sealing, max_shape, raw_bytes, stored_bytes FROM series WHERE id=?"
)


@dataclass(frozen=True, slots=True)
class NewRecord:
    """One record, as its catalog row describes it. No element was read.

    Attributes:
        node: The node whose catalog has it.
        path: The path of its series below the run.
        number: Its number in the series.
        dtype: The dtype of the series, as stored.
        stats: Its statistics; None if it has none.
    """

    node: str
    path: str
    number: int
    key: Key
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    moment: Moment
    device: str
    stats: Stats | None


class NewestRecords:
    """Lists the newest records of one node's part of a run. Reads rows only, never elements. Not thread-safe.

    The catalog is opened for each look and closed again: a daemon that ends waits for no reader. Series with errors of
    formats are left out: their rows belong to records that are listed.

    Attributes:
        problem: Why the last look failed; "" if it did not.
        left_out: The records that were committed between two looks and never listed.
        damaged: The series whose new rows could not be read, counted at each look.
    """

    def __init__(
        self, run: Path, node: str, *, limit: int = MAX_NEWEST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read nothing yet.

        Args:
            run: The directory of the run.
            node: The name of the node.
            limit: The most records of the list.
            clock: The time, in seconds.
        """
        self.run, self.node = run, node
        self._directory = node_directory(run, node)
        self._limit, self._clock = limit, clock
        # The records of each series, by its id.
        self._counts: dict[int, int] | None = None
        self._series: dict[int, SeriesRow] = {}
        self._seen: tuple[tuple[int, int, int], ...] = ()
        self._identity: tuple[int, int] | None = None
        self._due = 0.0
        self._live: Path | None = None
        self._records: list[NewRecord] = []
        self.problem = ""
        self.left_out = self.damaged = 0

    @property
    def records(self) -> list[NewRecord]:
        """The records of the last look, the newest first."""
        return self._records

    def look(self) -> list[NewRecord]:
        """Read what is new and return the newest records, the newest first. Raises nothing; see `problem`."""
        began = self._clock()
        if began < self._due:
            return self._records
        try:
            self._begin_again_if_new()
            catalog = self._catalog()
            seen = _signature(catalog)
            if seen == self._seen:
                self.problem = ""
                return self._records
            with contextlib.closing(connect_read_only(catalog)) as db:
                # All reads see one snapshot.
                db.execute("BEGIN")
                is_first = self._counts is None
                new, found = self._new_in(db)
        except _PROBLEMS as error:
            self.problem = str(error) or type(error).__name__
            return self._records
        finally:
            self._due = began + _SHARE * (self._clock() - began)
        self.problem = ""
        is_settled = time.time_ns() - max(changed for _, _, changed in seen) > _SETTLED_NS
        self._seen = seen if is_settled else ()
        merged = sorted(
            [*found, *self._records], key=lambda record: (record.moment.time_ns, record.number), reverse=True
        )
        self._records = merged[: self._limit]
        if not is_first:
            listed = {id(record) for record in self._records}
            self.left_out += new - sum(id(record) in listed for record in found)
        return self._records

    def _begin_again_if_new(self) -> None:
        """Forget a run that was removed and begun again with the same name."""
        try:
            found = self._directory.stat()
        except FileNotFoundError:
            return
        identity = found.st_dev, found.st_ino
        if self._identity not in (None, identity):
            self._counts, self._seen, self._live, self._records = None, (), None, []
            self._series.clear()
        self._identity = identity

    def _catalog(self) -> Path:
        if self._live is None:
            self._live = live_catalog(self._directory)
        # On a network file system, another machine sees only the published snapshot.
        return self._live if self._live.exists() else self._directory / CATALOG_NAME

    def _new_in(self, db: sqlite3.Connection) -> tuple[int, list[NewRecord]]:
        """Return the number of records that are new, and those of them that may be listed."""
        before = self._counts or {}
        counts: dict[int, int] = dict(db.execute(_SELECT_COUNTS))
        if set(map(type, counts.values())) - {int} or min(counts.values(), default=0) < 0:
            raise ValueError("the catalog's counts are not valid")
        held = before.get
        grown = [(at, n) for at, n in counts.items() if n > held(at, 0)]
        new = sum(n - held(at, 0) for at, n in grown)
        # Of a large model no list can show all. The series of the last layers come last.
        each = max(1, min(self._limit, _MAX_ROWS // max(1, min(len(grown), _MAX_SERIES))))
        found: list[NewRecord] = []
        for at in [at for at in self._series if counts.get(at, 0) < held(at, 0)]:
            # The series was removed, or made again by a repair.
            del self._series[at]
        for at, n in grown[-_MAX_SERIES:]:
            try:
                found += self._rows(db, at, max(held(at, 0), n - each), n)
            except sqlite3.OperationalError:
                raise
            except _DAMAGE:
                self.damaged += 1
        self._counts = counts
        return new, found

    def _rows(self, db: sqlite3.Connection, series: int, first: int, end: int) -> list[NewRecord]:
        known = self._series.get(series)
        if known is None:
            row = db.execute(_SELECT, (series,)).fetchone()
            if row is None:
                return []
            if len(self._series) >= _MAX_KNOWN:
                self._series.clear()
            known = self._series[series] = series_row(row)
        return [self._record(known, number, row) for number, row in read_records(db, series, first, end)]

    def _record(self, series: SeriesRow, number: int, row: RecordRow) -> NewRecord:
        header = series.header
        sound_row(row, header)
        return NewRecord(
            node=self.node,
            path=header.path,
            number=number,
            key=header.key,
            dtype=header.dtype,
            shape=row.shape,
            nbytes=row.nbytes,
            moment=row.moment,
            device=row.device,
            stats=None if row.stats is None else public(row.stats),
        )


def _signature(catalog: Path) -> tuple[tuple[int, int, int], ...]:
    """Return what changes with the catalog: inode, size and time of its file and of its write-ahead log."""
    found = []
    for place in (catalog, catalog.with_name(f"{catalog.name}-wal")):
        with contextlib.suppress(FileNotFoundError):
            status = place.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    if not found:
        raise FileNotFoundError(f"there is no catalog at {catalog} yet")
    return tuple(found)
