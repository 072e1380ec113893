"""One node's part of a damaged run, saved into a new run.

Every record is searched in all places: sealed shards, open shards and small logs. COMMIT frames name the records. If a
COMMIT is lost, the catalog names its records, or the published columns do.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import uuid
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import msgspec

from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, SessionRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.catalog.sums import read_slice
from capd.store.disk.layout import node_directory, series_on_disk
from capd.store.format.encode import ChunkResult
from capd.store.format.frames import UNKNOWN_CLIENT, FileHeader, RecordRow, SeriesHeader
from capd.store.read.node import sound_row
from capd.store.recover.salvage import Salvaged, ShardSource
from capd.store.recover.spool_copies import Capture, SpoolCopies
from capd.store.repair.catalog import UNREADABLE
from capd.store.repair.result import LostRecord, Repair
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.run_store import RunStore
from capd.store.scan.survey import SurveyedSeries, shard_files, survey_series
from capd.store.shards.series import Plan
from capd.store.verify.run import run_identity
from capd_client.protocol.key import Moment

__all__ = ["DamagedNode"]

_SMALL_AT_ONCE = 256
# Moment and shape.
Occasion = tuple[Moment, tuple[int, ...]]


class _CatalogCopy:
    """A copy of a node's catalog; empty if it is unreadable. A copy, because SQLite may write files next to it."""

    def __init__(self, original: Path, copy: Path) -> None:
        self._path = copy
        self.series: dict[str, SeriesRow] = {}
        self.sessions: list[SessionRow] = []
        with contextlib.suppress(*UNREADABLE):
            for suffix in ("", "-wal"):
                source = original.with_name(original.name + suffix)
                if source.is_file():
                    shutil.copyfile(source, copy.with_name(copy.name + suffix))
            with contextlib.closing(connect_read_only(copy)) as database:
                self.series = {row.header.path: row for row in read_series(database)}
                self.sessions = read_sessions(database)

    def rows(self, path: str) -> dict[int, RecordRow]:
        """Return the rows of a series by record number."""
        series = self.series.get(path)
        if series is not None:
            with contextlib.suppress(*UNREADABLE):
                found = read_slice(self._path, series.id, 0, series.records).rows
                return {number: sound_row(row, series.header) for number, row in found.items()}
        return {}


class DamagedNode:
    """One node's part of the damaged run and of the new run."""

    def __init__(
        self, run: Path, node: str, root: Path, done: Repair, progress: Callable[[int], None] | None
    ) -> None:
        self._run, self._node, self._done, self._progress = run, node, done, progress
        # The two differ if somebody renamed the run.
        self._ids = {run_identity(run), run.stem}
        directory = node_directory(run, node)
        self._catalog = _CatalogCopy(directory / CATALOG_NAME, root / f"{node}.sqlite")
        headers = {path: row.header for path, row in self._catalog.series.items()}
        self._copies = SpoolCopies(directory / "spool", headers, self._owns)
        self._headers = {**self._copies.headers, **headers}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = StoreOptions(open_files=open_files_within(soft))
        self._store = RunStore(root, done.new.stem, node, options)
        self._small: list[tuple[Plan, RecordRow, bytes]] = []
        # The captures that are saved or listed as lost.
        self._accounted: set[Capture] = set()
        self._nameless = 0
        # The client of records that lost their own client.
        self._client = uuid.uuid4().bytes
        self._nbytes = 0

    def __enter__(self) -> DamagedNode:
        return self

    def __exit__(self, *_: object) -> None:
        with self._copies:
            self._store.close()

    def _owns(self, file: FileHeader) -> bool:
        return file.run_id in self._ids and file.node == self._node

    def save(self) -> set[str]:
        """Save all records of this node. Return the paths of its series."""
        saved: set[str] = set()
        for path in sorted({*series_on_disk(self._run), *self._headers}):
            surveyed = survey_series(self._run, path, self._node, self._headers.get(path))
            header = self._headers.get(path) if surveyed is None else surveyed.header
            if header is None:
                continue
            saved.add(path)
            plan = Plan(header)
            for row, taken in self._sound(header, surveyed):
                self._commit(plan, row, taken)
            self._flush()
        self._done.unknown += self._copies.without_series(self._accounted)
        for session in self._catalog.sessions:
            self._store.save_session(session)
        self._store.seal()
        return saved

    def _rows(self, header: SeriesHeader, surveyed: SurveyedSeries | None) -> dict[int, RecordRow]:
        """Return the rows by record number: from the COMMITs, else the catalog, else the published columns."""
        rows = self._catalog.rows(header.path)
        for number, row in {} if surveyed is None else surveyed.rows.items():
            known = rows.get(number)
            agrees = known is not None and (known.moment, known.shape) == (row.moment, row.shape)
            if row.client != UNKNOWN_CLIENT or not agrees:
                rows[number] = row
        return rows

    def _sound(
        self, header: SeriesHeader, surveyed: SurveyedSeries | None
    ) -> Iterator[tuple[RecordRow, Salvaged]]:
        """Yield the intact records of a series with their elements. Other records are added to `lost`."""
        rows = self._rows(header, surveyed)
        lost: list[tuple[int, RecordRow | None]] = []
        seen: set[Capture] = set()
        # The saved records that lost their client and sequence.
        nameless: set[Occasion] = set()
        # Without a survey the shards belong to another node.
        files = {} if surveyed is None else shard_files(self._run / header.path)
        for number, row, taken in self._numbered(header, files, rows, self._sealed(header, surveyed)):
            if row is None or taken is None:
                lost.append((number, row))
                continue
            seen.add((row.client, row.sequence))
            if row.client == UNKNOWN_CLIENT:
                nameless.add((row.moment, row.shape))
            yield row, taken
        missing = {(row.client, row.sequence) for _, row in lost if row is not None}
        self._accounted |= seen | missing
        added: set[Occasion] = set()
        for number, row, taken in self._copies.others(header, seen):
            if (row.moment, row.shape) in nameless:
                continue
            if taken is not None:
                added.add((row.moment, row.shape))
                yield row, taken
            elif (row.client, row.sequence) not in missing:
                lost.append((number, row))
        self._done.lost += [
            LostRecord(header.path, header.key, number, row)
            for number, row in lost
            if row is None or row.client != UNKNOWN_CLIENT or (row.moment, row.shape) not in added
        ]

    def _sealed(self, header: SeriesHeader, surveyed: SurveyedSeries | None) -> int:
        """Return the number after the last sealed record. After it, a shared chunk of a sealed shard has only zeros."""
        known = self._catalog.series.get(header.path)
        newest = -1 if surveyed is None else max(surveyed.records, default=-1)
        return max(newest + 1, 0 if known is None else known.sealed)

    def _numbered(
        self, header: SeriesHeader, files: dict[int, Path], rows: dict[int, RecordRow], sealed: int
    ) -> Iterator[tuple[int, RecordRow | None, Salvaged | None]]:
        """Yield every numbered record with its row and its elements; None for a part that is lost."""
        per_shard = header.geometry.shard_records
        count = max(rows, default=-1) + 1
        for shard in range(-(-count // per_shard)):
            with contextlib.ExitStack() as stack:
                source: ShardSource | None = None
                if shard in files:
                    with contextlib.suppress(OSError):
                        source = stack.enter_context(ShardSource(files[shard], header, shard))
                for number in range(shard * per_shard, min(count, (shard + 1) * per_shard)):
                    row = rows.get(number)
                    if row is None or row.is_lost:
                        yield number, None, None
                        continue
                    taken = source.take(number, row) if source is not None and number < sealed else None
                    found = self._copies.take(header, row) if taken is None else (row, taken)
                    yield (number, row, None) if found is None else (number, *found)

    def _commit(self, plan: Plan, row: RecordRow, taken: Salvaged) -> None:
        if row.client == UNKNOWN_CLIENT:
            self._nameless += 1
            row = msgspec.structs.replace(row, client=self._client, sequence=self._nameless)
        if isinstance(taken, list):
            nbytes = prod(plan.geometry.chunk) * plan.geometry.itemsize
            chunks = (ChunkResult(ordinal, encoded, nbytes, None) for ordinal, encoded in taken)
            self._store.commit(plan, row, chunks)
            self._store.maintain()
        else:
            self._small.append((plan, row, taken.tobytes()))
            if len(self._small) == _SMALL_AT_ONCE:
                self._flush()
        self._done.saved += 1
        self._nbytes += row.nbytes
        if self._progress is not None:
            self._progress(self._nbytes)

    def _flush(self) -> None:
        if self._small:
            self._store.commit_small(self._small)
            self._small = []
            self._store.maintain()
        self._store.flush_catalog()
