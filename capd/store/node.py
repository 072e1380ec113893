"""A reader's view of one node's part of a run: the catalog, and what the frames hold beyond it.

Works beside a live daemon, after a kill, and on a sealed store; changes nothing. The spool is read before the
catalog: a record that leaves the spool in between was written to the catalog first. Spool files that grow
while they are read are read at slightly different times; records beyond the catalog then count only as far as
their clients' sequences have no gap, so that every look shows a prefix of what each rank captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from capd.store.catalog_read import (
    CATALOG_NAME,
    SeriesRow,
    SessionRow,
    connect_read_only,
    read_acked,
    read_records,
    read_series,
    read_sessions,
)
from capd.store.frames import RecordRow, SeriesHeader
from capd.store.scan import ScannedShard, scan_log, scan_shard
from capd.store.small import LOG_GLOB, SmallRecord

__all__ = ["NodeView", "SpooledSeries"]


@dataclass(slots=True)
class SpooledSeries:
    """What the spool holds of one series. shards: by shard number; logged: by record number."""

    header: SeriesHeader
    shards: dict[int, tuple[Path, ScannedShard]] = field(default_factory=dict)
    logged: dict[int, tuple[SmallRecord, RecordRow]] = field(default_factory=dict)

    def keep(self, visible: Callable[[RecordRow], bool]) -> None:
        """Forget records that are not `visible`."""
        for _, scanned in self.shards.values():
            scanned.rows = {n: row for n, row in scanned.rows.items() if visible(row)}
        self.logged = {n: (place, row) for n, (place, row) in self.logged.items() if visible(row)}

    def rows(self) -> Iterator[tuple[int, RecordRow]]:
        """Records in the spool; a shard's row (with statistics) goes before a log's."""
        held = {number: row for _, scanned in self.shards.values() for number, row in scanned.rows.items()}
        yield from held.items()
        yield from ((number, row) for number, (_, row) in self.logged.items() if number not in held)


class NodeView:
    """One `.capd/node=…` directory, read-only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name.removeprefix("node=")
        before = self._spool_sizes()
        self.spooled = self.read_spool()
        grew = self._spool_sizes() != before
        self.rows: dict[str, SeriesRow] = {}
        self.sessions: list[SessionRow] = []
        acked: dict[bytes, list[tuple[int, int]]] = {}
        self._catalog = directory / CATALOG_NAME
        if self._catalog.exists():
            database = connect_read_only(self._catalog)
            try:
                database.execute("BEGIN")  # one snapshot for the three
                self.rows = {row.header.path: row for row in read_series(database)}
                self.sessions = read_sessions(database)
                acked = read_acked(database)
            finally:
                database.close()
        if grew:
            self._cut_to_prefix(acked)
        for path, spooled in self.spooled.items():
            self._extend(path, spooled)

    def _spool_sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path in (self.directory / "spool").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
                sizes[path.name] = path.stat().st_size
        return sizes

    def _cut_to_prefix(self, acked: dict[bytes, list[tuple[int, int]]]) -> None:
        found: dict[bytes, set[int]] = {}
        for spooled in self.spooled.values():
            for _, row in spooled.rows():
                found.setdefault(row.client, set()).add(row.sequence)
        last = {client: ranges[-1][1] for client, ranges in acked.items() if ranges}
        for client, sequences in found.items():
            end = last.get(client, min(sequences) - 1)
            while end + 1 in sequences:
                end += 1
            last[client] = end
        for spooled in self.spooled.values():
            spooled.keep(lambda row: row.sequence <= last[row.client])

    def _extend(self, path: str, spooled: SpooledSeries) -> None:
        """Add what the spool holds beyond the catalog to the totals."""
        row = self.rows.setdefault(path, SeriesRow(-1, spooled.header, 0, 0, False, (), 0, 0))
        known = row.records
        for number, record in spooled.rows():
            if number >= known:
                row.records = max(row.records, number + 1)
                row.raw_bytes += record.nbytes
                shape = row.max_shape or record.shape
                row.max_shape = tuple(max(pair) for pair in zip(shape, record.shape, strict=True))

    def read_spool(self) -> dict[str, SpooledSeries]:
        """The spool as it is now; files that vanish while it is read were sealed or emptied.

        Logs before shards: a record on its way from one to the other is seen in at least one of them.
        """
        spool = self.directory / "spool"
        found: dict[str, SpooledSeries] = {}
        for path in sorted(spool.glob(LOG_GLOB)):
            with contextlib.suppress(FileNotFoundError):
                for logged in scan_log(path) or ():
                    series = found.setdefault(logged.header.path, SpooledSeries(logged.header))
                    series.logged[logged.record] = (logged.place, logged.row)
        for path in sorted(spool.glob("*.partial")):
            with contextlib.suppress(FileNotFoundError):
                scanned = scan_shard(path)
                if scanned is not None:
                    series = found.setdefault(scanned.header.path, SpooledSeries(scanned.header))
                    series.shards[scanned.shard] = (path, scanned)
        return found

    def records(self, path: str) -> dict[int, RecordRow]:
        """All records of a series at the time of the look, by number: catalog rows, then the spool's."""
        row = self.rows[path]
        found: dict[int, RecordRow] = {}
        if row.id >= 0:
            database = connect_read_only(self._catalog)
            try:
                found = dict(read_records(database, row.id))
            finally:
                database.close()
        if path in self.spooled:
            for number, record in self.spooled[path].rows():
                if number not in found or found[number].stats is None:
                    found[number] = record
        return {number: found[number] for number in sorted(found) if number < row.records}
