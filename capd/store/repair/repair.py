"""Saves what can be read of a damaged run into a new one. The damaged run is only read.

Every record is looked for wherever it may be: in sealed shards, in open shards, and in small logs. COMMIT frames name
it; where they are lost, the catalog does, or the published columns. What reads soundly is committed to the new run
through a `RunStore`, in the old order and under new, dense numbers. Everything else is listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import msgspec

from capd.errors import ConfigError, DamagedRecord, StoreBusy, StoreError, StoreFull
from capd.space import if_full, mount_of, shown_size
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, SessionRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.catalog.sums import read_slice
from capd.store.disk.files import make_directory, remove_tree, rename, sync_paths
from capd.store.disk.layout import node_directory, nodes_of, series_on_disk
from capd.store.format.encode import ChunkResult
from capd.store.format.frames import UNKNOWN_CLIENT, FileHeader, RecordRow, SeriesHeader
from capd.store.read.node import sound_row
from capd.store.recover.salvage import Salvaged, ShardSource
from capd.store.recover.spool_copies import Capture, SpoolCopies
from capd.store.repair.catalog import UNREADABLE
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.run_store import RunStore
from capd.store.scan.published import read_published
from capd.store.scan.survey import SurveyedSeries, shard_files, survey_series
from capd.store.shards.series import Plan
from capd.store.verify.run import run_identity
from capd_client.protocol.key import Key, Moment

__all__ = ["LostRecord", "Repair", "repair"]

_SMALL_AT_ONCE = 256
Occasion = tuple[Moment, tuple[int, ...]]  # moment and shape


@dataclass(frozen=True, slots=True)
class LostRecord:
    """A record that the new run lacks. number: in the damaged run. row: None if nothing says what it was."""

    path: str
    key: Key
    number: int
    row: RecordRow | None


@dataclass(slots=True)
class Repair:
    """What a repair did. unknown: paths of series of which nothing says what they are."""

    run: Path
    new: Path
    saved: int = 0
    lost: list[LostRecord] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the new run has all records of the damaged one."""
        return not self.lost and not self.unknown


def repair(run: Path, new: Path, *, progress: Callable[[int], None] | None = None) -> Repair:
    """Make the run `new` of all records of `run` that can be read. Until it is whole, `new` does not exist.

    Args:
        run: the damaged run; nobody may be writing to it.
        new: where the new run shall be, a path that ends in `.zarr`.
        progress: is called with the bytes saved so far, uncompressed.

    Raises:
        ConfigError: `new` cannot be the name of a new run, exists already, or lies inside `run`.
        NotAStore: `run` is no run.
        StoreFull: there is no room for it.
        StoreError: it cannot be written.
    """
    run_identity(run)
    _check_place(run, new)
    done = Repair(run, new)
    try:
        make_directory(new.parent)
        with _building(new) as root:
            saved: set[str] = set()
            for node in _writers(run):
                with _Node(run, node, root, done, progress) as part:
                    saved |= part.save()
            done.unknown = [p for p in series_on_disk(run) if p not in saved and shard_files(run / p)]
            if not (root / new.name).exists():  # not a single node wrote to it
                RunStore(root, new.stem, "node0", StoreOptions()).close()
            rename(root / new.name, new)
            sync_paths([new, new.parent], new.parent)
    except OSError as error:
        full = if_full(error, new)
        raise full if full is not error else StoreError(f"cannot write {new}: {error.strerror}") from error
    return done


def _check_place(run: Path, new: Path) -> None:
    if new.suffix != ".zarr":
        raise ConfigError(f"{new} cannot be the name of a run; give -o a path that ends in .zarr")
    if os.path.lexists(new):
        raise ConfigError(f"{new} exists already; give -o the path of a new run")
    if new.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"{new} lies inside {run}, which stays as it is; give -o a path outside of it")
    place = mount_of(new)
    found = os.statvfs(place)
    free, needed = found.f_bavail * found.f_frsize, _nbytes(run)
    if needed > free:
        raise StoreFull(
            f"{new} may need {shown_size(needed)}, the file system {place} has {shown_size(free)} free; "
            "make room there, or give -o a path on another file system"
        )


def _nbytes(run: Path) -> int:
    """Bytes of everything that holds records."""
    total = 0
    for pattern in ("*/rank*/layer*/*/*/data/c/**/*", ".capd/node=*/spool/*", f".capd/node=*/{CATALOG_NAME}"):
        total += sum(path.stat().st_size for path in run.glob(pattern) if path.is_file())
    return total


@contextlib.contextmanager
def _building(new: Path) -> Iterator[Path]:
    """A directory beside `new` in which it is made. Raises StoreBusy while another repair makes the same run."""
    root = new.with_name(f".{new.name}.repair")
    root.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusy(f"another repair makes {new}; wait for it, or give -o another path") from None
        try:
            for left in root.iterdir():  # by one that was killed
                remove_tree(left)
            yield root
        finally:
            remove_tree(root)
    finally:
        os.close(lock)


def _writers(run: Path) -> list[str]:
    """Nodes that wrote to the run, by its directories and by what its series say."""
    found = set(nodes_of(run))
    for path in series_on_disk(run):
        with contextlib.suppress(DamagedRecord):
            found.add(read_published(run / path).node)
    return sorted(found - {""})


class _Catalog:
    """A copy of a node's catalog, which SQLite may write beside; empty where it cannot be read."""

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
        """Rows of a series by record number."""
        series = self.series.get(path)
        if series is not None:
            with contextlib.suppress(*UNREADABLE):
                found = read_slice(self._path, series.id, 0, series.records).rows
                return {number: sound_row(row, series.header) for number, row in found.items()}
        return {}


class _Node:
    """One node's part of the run, and of the new one."""

    def __init__(
        self, run: Path, node: str, root: Path, done: Repair, progress: Callable[[int], None] | None
    ) -> None:
        self._run, self._node, self._done, self._progress = run, node, done, progress
        self._ids = {run_identity(run), run.stem}  # they differ once somebody renamed the run
        directory = node_directory(run, node)
        self._catalog = _Catalog(directory / CATALOG_NAME, root / f"{node}.sqlite")
        headers = {path: row.header for path, row in self._catalog.series.items()}
        self._copies = SpoolCopies(directory / "spool", headers, self._owns)
        self._headers = {**self._copies.headers, **headers}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = StoreOptions(open_files=open_files_within(soft))
        self._store = RunStore(root, done.new.stem, node, options)
        self._small: list[tuple[Plan, RecordRow, bytes]] = []
        self._nameless = 0
        self._client = uuid.uuid4().bytes  # of the records that lost theirs
        self._nbytes = 0

    def __enter__(self) -> _Node:
        return self

    def __exit__(self, *_: object) -> None:
        with self._copies:
            self._store.close()

    def _owns(self, file: FileHeader) -> bool:
        return file.run_id in self._ids and file.node == self._node

    def save(self) -> set[str]:
        """Save everything of this node; returns the paths of its series."""
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
        for session in self._catalog.sessions:
            self._store.save_session(session)
        self._store.seal()
        return saved

    def _rows(self, header: SeriesHeader, surveyed: SurveyedSeries | None) -> dict[int, RecordRow]:
        """What names the records, by number: their COMMITs, else the catalog, else the published columns."""
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
        """The records of a series that read soundly, with their elements. Others join `lost`."""
        rows = self._rows(header, surveyed)
        lost: list[tuple[int, RecordRow | None]] = []
        seen: set[Capture] = set()
        nameless: set[Occasion] = set()  # of the saved records that lost their client and sequence
        files = {} if surveyed is None else shard_files(self._run / header.path)  # else another node's
        for number, row, taken in self._numbered(header, files, rows, self._sealed(header, surveyed)):
            if row is None or taken is None:
                lost.append((number, row))
                continue
            seen.add((row.client, row.sequence))
            if row.client == UNKNOWN_CLIENT:
                nameless.add((row.moment, row.shape))
            yield row, taken
        missing = {(row.client, row.sequence) for _, row in lost if row is not None}
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
        """The number after the last sealed record: beyond it, a shared chunk of a sealed shard holds only zeros."""
        known = self._catalog.series.get(header.path)
        newest = -1 if surveyed is None else max(surveyed.records, default=-1)
        return max(newest + 1, 0 if known is None else known.sealed)

    def _numbered(
        self, header: SeriesHeader, files: dict[int, Path], rows: dict[int, RecordRow], sealed: int
    ) -> Iterator[tuple[int, RecordRow | None, Salvaged | None]]:
        """Every record that has a number: its row, and its elements, as far as they are known."""
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
