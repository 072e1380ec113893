"""One node's part of a damaged run, saved into a new run.

Every record is searched in all places: small logs, open shards and sealed shards. COMMIT frames name the records. If a
COMMIT is lost, the catalog names its records, or the published columns do.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from capd.errors import DamagedRecord
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.catalog.sums import read_slice
from capd.store.disk.layout import PARTIAL_GLOB, by_digest, named, node_directory, series_on_disk
from capd.store.documents.headers import fits, sound_row
from capd.store.documents.zarr_json import run_ids
from capd.store.format.dtypes import is_errors
from capd.store.format.encode import ChunkResult
from capd.store.format.frames import UNKNOWN_CLIENT, RecordRow, SeriesHeader
from capd.store.format.log_places import LOG_GLOB, offset_of
from capd.store.recover.salvage import Salvaged
from capd.store.repair.catalog import UNREADABLE, readable_rows
from capd.store.repair.result import LostRecord, Repair
from capd.store.repair.shards import SeriesShards
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.run_store import RunStore
from capd.store.scan.scan import LoggedRecord
from capd.store.scan.survey import (
    SurveyedSeries,
    log_if_readable,
    scan_if_readable,
    shard_files,
    survey_series,
)
from capd.store.shards.series import Plan
from capd.store.shards.small_log import read_small

__all__ = ["DamagedNode"]

_SMALL_AT_ONCE = 256
# Client, sequence and shape.
Capture = tuple[bytes, int, tuple[int, ...]]


class _CatalogCopy:
    """A copy of a node's catalog; empty if it is unreadable. A copy, because SQLite may write files next to it."""

    def __init__(self, original: Path, copy: Path) -> None:
        self._path = copy
        with contextlib.suppress(OSError):
            for suffix in ("", "-wal"):
                source = original.with_name(original.name + suffix)
                if source.is_file():
                    shutil.copyfile(source, copy.with_name(copy.name + suffix))
        series, self.sessions, _ = readable_rows(copy)
        self.series = {row.header.path: row for row in series}

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
        directory = node_directory(run, node)
        self._catalog = _CatalogCopy(directory / CATALOG_NAME, root / f"{node}.sqlite")
        self._scratch = root / f"{node}.shard"
        self._headers = {path: row.header for path, row in self._catalog.series.items()}
        # By series: the open shards, and all records of the spool with their numbers.
        self._partials: dict[str, dict[int, Path]] = {}
        self._spooled: dict[str, list[tuple[int, RecordRow]]] = {}
        # Also the records whose series is lost.
        self._logged: dict[Capture, tuple[Path, LoggedRecord]] = {}
        self._read_spool(directory / "spool")
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._store = RunStore(root, done.new.stem, node, StoreOptions(open_files=open_files_within(soft)))
        self._small: list[tuple[Plan, RecordRow, bytes]] = []
        # The captures that are saved or listed as lost.
        self._accounted: set[tuple[object, ...]] = set()
        self._nameless = 0
        # The client of records that lost their own client.
        self._client = uuid.uuid4().bytes
        self._nbytes = 0

    def __enter__(self) -> DamagedNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def _read_spool(self, spool: Path) -> None:
        # The two differ if somebody renamed the run.
        owner = (run_ids(self._run), self._node)
        for path in _files(spool, LOG_GLOB):
            log = log_if_readable(path)
            if log is None or (log.file is not None and log.file.foreign(*owner)):
                continue
            for logged in log.records:
                self._logged.setdefault(logged.row.capture, (path, logged))
                if logged.header is not None:
                    self._add(logged.header, [(logged.record, logged.row)])
        digests = by_digest(self._headers.values())
        for path in _files(spool, PARTIAL_GLOB):
            shard = scan_if_readable(path, named(path, digests))
            if shard is None and path.stat().st_size:
                self._done.unknown.append(f"{path}: nothing names its series, or it cannot be read")
            if shard is None or (shard.file is not None and shard.file.foreign(*owner)):
                continue
            self._add(shard.header, shard.rows.items())
            self._partials.setdefault(shard.header.path, {})[shard.shard] = path

    def _add(self, header: SeriesHeader, rows: Iterable[tuple[int, RecordRow]]) -> None:
        self._headers.setdefault(header.path, header)
        self._spooled.setdefault(header.path, []).extend(rows)

    def save(self) -> set[str]:
        """Save all records of this node. Return the paths of its series."""
        saved: set[str] = set()
        for path in sorted({*series_on_disk(self._run), *self._headers}):
            surveyed = survey_series(self._run, path, self._node, self._headers.get(path))
            header = self._headers.get(path) if surveyed is None else surveyed.header
            if header is not None:
                saved.add(path)
                self._save_series(header, surveyed)
        orphans = Counter(
            path
            for capture, (path, logged) in self._logged.items()
            if logged.header is None and capture not in self._accounted
        )
        self._done.unknown += [f"{path}: {n} records whose series is lost" for path, n in orphans.items()]
        for session in self._catalog.sessions:
            self._store.save_session(session)
        self._store.seal()
        return saved

    def _save_series(self, header: SeriesHeader, surveyed: SurveyedSeries | None) -> None:
        """Save the intact records of a series. All other records are added to the lost ones."""
        path = header.path
        sealed = {} if surveyed is None else surveyed.rows
        # Without a survey the shards belong to another node.
        files = {} if surveyed is None else shard_files(self._run / path)
        known = self._catalog.series.get(path)
        published = max(max(sealed, default=-1) + 1, 0 if known is None else known.sealed)
        plan, lost = Plan(header), list[tuple[int, RecordRow | None]]()
        # The capture of each saved record, and its moment and shape.
        saved: set[tuple[object, ...]] = set()
        moved = {} if surveyed is None else surveyed.moved
        with SeriesShards(
            header, self._partials.get(path, {}), files, published, moved, self._scratch
        ) as shards:
            for number, row in self._records(path, sealed):
                if row is None:
                    lost.append((number, None))
                elif row.client == UNKNOWN_CLIENT or row.capture not in saved:
                    logged = self._from_log(header, row)
                    taken = shards.take(number, row) if logged is None else logged
                    if taken is None:
                        lost.append((number, row))
                    else:
                        row = shards.named(number, row)
                        self._commit(plan, row, taken)
                        saved |= {row.capture, (row.moment, row.shape)}
        self._flush()
        for number, row in lost:
            if row is not None:
                if (row.capture if row.client != UNKNOWN_CLIENT else (row.moment, row.shape)) in saved:
                    continue
                saved.add(row.capture)
            self._done.lost.append(LostRecord(path, header.key, number, row, is_errors(header.dtype)))
        self._accounted |= saved

    def _records(self, path: str, sealed: dict[int, RecordRow]) -> list[tuple[int, RecordRow | None]]:
        """Return all records of a series that anything names: by number, then those of the spool again.

        COMMITs name a record before the catalog does, and the published columns last. The row of a number without a
        name is None.
        """
        known, spooled = self._catalog.rows(path), self._spooled.get(path, [])
        names = {(row.moment, row.shape): row for row in (*known.values(), *dict(spooled).values())}
        rows = known | dict(spooled)
        for number, row in sealed.items():
            rows[number] = names.get((row.moment, row.shape), row) if row.client == UNKNOWN_CLIENT else row
        numbered = [(number, rows.get(number)) for number in range(max(rows, default=-1) + 1)]
        # Catalog and spool may name different records by one number.
        others = [(n, row) for n, row in known.items() if n not in sealed and row.client != UNKNOWN_CLIENT]
        found = [*numbered, *spooled, *others]
        return [(n, None if row is None or row.is_lost else row) for n, row in found]

    def _from_log(self, header: SeriesHeader, row: RecordRow) -> Salvaged | None:
        """Return the elements of a record from a small log; None if no log has them intact."""
        path, logged = self._logged.get(row.capture, (None, None))
        if path is None or logged is None or (logged.header or header).path != header.path:
            return None
        try:
            with path.open("rb", buffering=0) as file:
                raw, _, _ = read_small(file.fileno(), offset_of(logged.place))
        except (OSError, DamagedRecord):
            return None
        return np.frombuffer(raw, np.uint8) if fits(header, row.shape, len(raw)) else None

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
        if is_errors(plan.header.dtype):
            self._done.saved_errors += 1
        else:
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


def _files(spool: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(spool.glob(pattern)) if path.is_file() and not path.is_symlink()]
