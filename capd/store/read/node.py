"""A reader's view of one node's part of a run: the catalog, and the frames that are not in it yet.

The view works while a daemon runs, after a kill, and on a sealed store. It changes nothing. The spool is read before
the catalog: a record that leaves the spool in between was written to the catalog first.

Growing spool files are read at slightly different times. Records beyond the catalog then count only up to the first
gap in their client's sequences. So every view shows a prefix of each rank's captures.

The catalog is derived data without checksums. If it is missing or damaged, the journals of the sealed shards replace
it, with a warning.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from capd.errors import NotAStore, RemovedRun, StoreError
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import ALERTS_NAME, read_alerts
from capd.store.catalog.opening import DamagedCatalog, connect_read_only, regular_nbytes
from capd.store.catalog.rows import (
    CATALOG_NAME,
    SeriesRow,
    SessionRow,
    has_attempt,
    read_acked,
    read_attempts,
    read_heads,
    read_records,
    read_series,
    read_stored,
)
from capd.store.catalog.sessions import read_sessions
from capd.store.documents.headers import sound_row
from capd.store.documents.tombstone import removed_series
from capd.store.documents.zarr_json import run_attributes
from capd.store.format.frames import RecordHead, RecordRow
from capd.store.format.ranges import RangeSet
from capd.store.keeps.file import keeps_path, read_keeps
from capd.store.keeps.keep import Keep
from capd.store.read.spool import Spool, SpooledSeries
from capd.store.scan.survey import survey, survey_series

__all__ = ["NodeView"]

logger = logging.getLogger(__name__)

_DAMAGE = (DamagedCatalog, sqlite3.DatabaseError, ValueError, TypeError, ArithmeticError, RecursionError)
# The smallest row of a record: its client and sequence, moment and shape.
_MIN_ROW_NBYTES = 32
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
T = TypeVar("T")
H = TypeVar("H", RecordHead, RecordRow)


class NodeView:
    """A read-only view of one `.capd/node=…` directory. series: by path. before: an earlier view of the same node.

    only: The path of the one series that the view shows; None for all. A run may have 100,000.
    """

    def __init__(
        self, run: Path, directory: Path, before: NodeView | None = None, only: str | None = None
    ) -> None:
        self.run, self.directory, self._only = run, directory, only
        self.name = directory.name.removeprefix("node=")
        self.spool: Spool = Spool(directory / "spool") if before is None else before.spool
        sizes = self.spool.sizes()
        self.spooled = self.spool.read()
        grew = self.spool.sizes() != sizes
        self.series: dict[str, SeriesRow] = {}
        self.sessions: list[SessionRow] = []
        # Rows by series path and number.
        self._from_shards: dict[str, dict[int, RecordRow]] = {}
        self._acked: dict[bytes, RangeSet] = {}
        self._catalog = directory / CATALOG_NAME
        self._connection: sqlite3.Connection | None = None
        self._read_catalog()
        if grew:
            self._cut_to_prefix()
        for path, spooled in self.spooled.items():
            if only in (None, path):
                self._extend(path, spooled)

    def look_again(self) -> None:
        """Read the spool again. The records of this view stay the same."""
        self.spooled = self.spool.read()

    def check_removal(self, path: str = "") -> None:
        """Check that the run, and the series at `path`, were not removed since the view was made.

        Raises:
            RemovedRun: One of them was. The message says when and by whom.
        """
        try:
            attributes = run_attributes(self.run)
        except RemovedRun:
            raise
        except NotAStore:
            return
        if path and not (self.run / path).is_dir():
            for gone in (*removed_series(attributes, "removing"), *removed_series(attributes)):
                if path in gone.paths:
                    raise RemovedRun(f"series {path} of {self.run} was {gone.mark}")

    # -- the catalog --------------------------------------------------------------------------------------

    def _read_catalog(self) -> None:
        try:
            if not self._catalog.exists():
                raise FileNotFoundError("it is missing")
            with self._opened() as database:
                # All three reads see one snapshot.
                database.execute("BEGIN")
                self.series = {row.header.path: row for row in read_series(database, self._only)}
                self.sessions = read_sessions(database)
                self._acked = {client: RangeSet(ranges) for client, ranges in read_acked(database).items()}
            held = regular_nbytes(self._catalog) // _MIN_ROW_NBYTES
            if sum(row.records for row in self.series.values()) > held:
                raise ValueError(f"it counts more than the {held} records that a file of its size can hold")
        except (*_DAMAGE, FileNotFoundError) as error:
            self.series, self.sessions, self._acked = {}, [], {}
            for found in survey(self.run, self.name, {}):
                if self._only not in (None, found.header.path):
                    continue
                self._from_shards[found.header.path] = found.rows
                self.series[found.header.path] = found.as_row()
            if self.series:
                self._warn(f"{len(self.series)} series", error)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts of the node as its file has them now. Damaged lines are left out.

        Raises:
            StoreError: The file is not a regular one.
            OSError: It cannot be read.
        """
        return read_alerts(self.directory / ALERTS_NAME).items

    @property
    def keeps(self) -> list[Keep]:
        """The keeps of the flight recorder as the file of the node has them now. Raises as `alerts`."""
        return read_keeps(keeps_path(self.run, self.name)).items

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Keep one connection for all queries inside. Keep it short: a closing daemon does not wait for readers."""
        with contextlib.ExitStack() as stack:
            # Without a connection, each query opens its own and raises its own error.
            with contextlib.suppress(StoreError):
                self._connection = stack.enter_context(self._opened())
            try:
                yield
            finally:
                self._connection = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            database = self._connection or connect_read_only(self._catalog)
        except StoreError:
            self.check_removal()
            raise
        try:
            yield database
        except sqlite3.OperationalError as error:
            # An error for text that is not UTF-8 has no code.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY:
                raise StoreError(f"catalog {self._catalog}: {error}; try again", retry=True) from error
            raise
        finally:
            if database is not self._connection:
                database.close()

    def _warn(self, what: str, error: Exception) -> None:
        logger.warning(
            "catalog %s cannot be used (%s): %s read from the shards instead; "
            "start `capd serve` on the store to rebuild it",
            self._catalog, error, what,
        )  # fmt: skip

    def _ask(
        self,
        path: str,
        ask: Callable[[sqlite3.Connection, int], T],
        instead: Callable[[Mapping[int, RecordRow]], T],
    ) -> T:
        """Return the catalog's answer about a series, or that of its shards' journals if the catalog is damaged."""
        row = self.series[path]
        if path not in self._from_shards and row.id >= 0:
            try:
                with self._opened() as database:
                    return ask(database, row.id)
            except _DAMAGE as error:
                self._warn(path, error)
                found = survey_series(self.run, path, self.name, row.header)
                self._from_shards[path] = {} if found is None else found.rows
        return instead(self._from_shards.get(path, {}))

    # -- the spool ----------------------------------------------------------------------------------------

    def _cut_to_prefix(self) -> None:
        found: dict[bytes, set[int]] = {}
        for spooled in self.spooled.values():
            for _, row in spooled.rows():
                found.setdefault(row.client, set()).add(row.sequence)
        last = {client: ranges.ranges()[-1][1] for client, ranges in self._acked.items() if len(ranges)}
        for client, sequences in found.items():
            end = last.get(client, min(sequences) - 1)
            while end + 1 in sequences:
                end += 1
            last[client] = end
        for spooled in self.spooled.values():
            spooled.keep(lambda row: row.sequence <= last[row.client])

    def _extend(self, path: str, spooled: SpooledSeries) -> None:
        """Add the records that only the spool holds to the totals."""
        row = self.series.setdefault(path, SeriesRow(-1, spooled.header, 0, 0, False, (), 0, 0))
        known = row.records
        for number, record in spooled.rows():
            ranges = self._acked.get(record.client)
            if number >= known and (ranges is None or record.sequence not in ranges):
                row.records = max(row.records, number + 1)
                row.raw_bytes += record.nbytes
                shape = row.max_shape or record.shape
                row.max_shape = tuple(max(pair) for pair in zip(shape, record.shape, strict=True))

    # -- records ------------------------------------------------------------------------------------------

    def rows(self, path: str, first: int, last: int) -> dict[int, RecordRow]:
        """Return the records first ≤ number < last of a series in this view: catalog rows, else the spool's."""
        header = self.series[path].header

        def ask(database: sqlite3.Connection, series: int) -> dict[int, RecordRow]:
            found = read_records(database, series, first, last)
            return {number: sound_row(row, header) for number, row in found}

        return self._between(path, first, last, ask)

    def ids(self, path: str, first: int, last: int) -> dict[int, RecordHead]:
        """Return the heads of the same records, which identify them."""

        def ask(database: sqlite3.Connection, series: int) -> dict[int, RecordHead]:
            return dict(read_heads(database, series, first, last))

        return self._between(path, first, last, ask)

    def _between(
        self, path: str, first: int, last: int, ask: Callable[[sqlite3.Connection, int], dict[int, H]]
    ) -> dict[int, H]:
        def instead(known: Mapping[int, RecordRow]) -> dict[int, H]:
            return {n: row for n, row in known.items() if first <= n < last}

        found = self._ask(path, ask, instead)
        if (spooled := self.spooled.get(path)) is not None:
            for number in range(first, min(last, self.series[path].records)):
                if number not in found and (row := spooled.row(number)) is not None:
                    found[number] = row
        return found

    def attempts(self, path: str) -> tuple[int, int]:
        """Return the first and the last attempt among the records of a series; (0, 0) without records."""

        def instead(rows: Mapping[int, RecordRow]) -> list[int]:
            return [row.moment.attempt for row in rows.values()]

        spooled = self.spooled.get(path)
        known = [row.moment.attempt for _, row in spooled.rows()] if spooled is not None else []
        among: Sequence[int] | None = self._ask(path, read_attempts, instead)
        known += among or ()
        return (min(known), max(known)) if known else (0, 0)

    def stored_nbytes(self, path: str, numbers: Sequence[int]) -> int:
        """Return the bytes of some records of a series in shards; 0 for those that are only in the spool."""
        chosen = frozenset(numbers)

        def ask(database: sqlite3.Connection, series: int) -> int:
            return sum(nbytes for number, nbytes in read_stored(database, series) if number in chosen)

        def instead(rows: Mapping[int, RecordRow]) -> int:
            return self.series[path].stored_bytes * len(chosen & rows.keys()) // max(1, len(rows))

        return self._ask(path, ask, instead)

    @property
    def has_one_attempt(self) -> bool:
        """Whether the sessions show that all records are of the first attempt."""
        records = sum(row.records for row in self.series.values() if not row.holds_errors)
        counted = sum(session.offered for session in self.sessions)
        return not any(session.attempt for session in self.sessions) and counted >= records

    def with_attempt(self, attempt: int) -> set[str]:
        """Return the paths of all series that may have a record of this attempt."""
        try:
            with self._opened() as database:
                ids = has_attempt(database, attempt)
        except (*_DAMAGE, StoreError):
            return set(self.series)
        return {path for path, row in self.series.items() if row.id in ids or path in self.spooled}
