"""Moves uploaded shards: a verified local shard file is replaced by a stub that names its object.

The order is: verification of the object and of the local file → the stub beside the catalog, durable → its rename over
the shard, which frees the file → sync of the directory. A kill leaves the shard or the stub, never neither.

Only shards that no later record can join are moved. The last shard of a series always stays. Catalog and published
documents are made durable first, because the records of a moved shard cannot be read back from frames of this disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capd.errors import StoreBusy, StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, read_series
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import new_file, rename, sync_paths, unlink
from capd.store.disk.layout import node_directory, shard_path
from capd.store.disk.run_lock import RunLock
from capd.store.format.frames import SeriesHeader
from capd.store.objects.bucket import Bucket
from capd.store.scan.moved_shard import MAX_STUB_NBYTES, STUB_GLOB, MovedShard, encode_stub, moved_shard
from capd.store.segments.series_table import SeriesEntry, ShardObject
from capd.store.upload.checking import problem_of
from capd.store.upload.move_policy import MovePolicy, used_fraction

__all__ = ["ShardMover", "UploadedPart"]

logger = logging.getLogger(__name__)

# The time after which a shard whose object was found wrong is looked at again.
_AGAIN_S = 3600.0
_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One node's part of a run as its last manifest describes it.

    Attributes:
        run: The directory of the run.
        node: The name of the node.
        bucket: The place of the run in the object store.
        entries: The series in the last series segment.
    """

    run: Path
    node: str
    bucket: Bucket
    entries: Sequence[SeriesEntry]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A shard that may be moved. info: its file, as it was found."""

    part: UploadedPart
    header: SeriesHeader
    path: Path
    known: ShardObject
    info: os.stat_result

    @property
    def key(self) -> str:
        """The key of the object."""
        return self.path.relative_to(self.part.run).as_posix()


@dataclass(slots=True)
class ShardMover:
    """Moves the uploaded shards of runs by a policy.

    Attributes:
        policy: The shards that are due.
        on_moved: Is told the run and the file of each moved shard, as it was.
        is_stopping: Returns whether to begin no further shard.
        shards: The number of moved shards.
        nbytes: Their bytes.
        refused: The number of shards that stay because their object is wrong.
    """

    policy: MovePolicy
    on_moved: Callable[[Path, os.stat_result], None] = lambda _run, _file: None
    is_stopping: Callable[[], bool] = lambda: False
    shards: int = 0
    nbytes: int = 0
    refused: int = 0
    # When the object of a shard was found wrong.
    _wrong: dict[Path, float] = field(default_factory=dict)

    def move(self, parts: Iterable[UploadedPart]) -> None:
        """Move the shards that are due, the oldest first.

        Raises:
            ObjectStoreError: An object store does not answer. The rest stays until the next call.
            StoreError: A catalog cannot be read.
            OSError: The disk refused.
        """
        found = [one for part in parts if self._wants(part) for one in self._due(part)]
        found.sort(key=lambda one: one.info.st_mtime_ns)
        left = _Needed.of(self.policy, found)
        settled: set[Path] = set()
        for one in found:
            if self.is_stopping() or left.is_met(one):
                return
            if self._move(one, settled):
                left.count(one.info.st_size if one.info.st_nlink == 1 else 0)

    def _wants(self, part: UploadedPart) -> bool:
        """Return whether shards of a part may be due. Only then its files are looked at."""
        if self.policy.at is not None:
            return part.run.is_dir() and used_fraction(part.run)[0] >= self.policy.at
        return bool(self.policy)

    def _due(self, part: UploadedPart) -> Iterator[_Candidate]:
        """Yield the shards of a part that may be moved."""
        directory = node_directory(part.run, part.node)
        catalog = directory / CATALOG_NAME
        if not catalog.is_file():
            # The run was removed.
            return
        with contextlib.closing(connect_read_only(catalog)) as database:
            rows = {row.header.path: row for row in read_series(database)}
        for left in directory.glob(STUB_GLOB):
            unlink(left, missing_ok=True)
        for entry in part.entries:
            row = rows.get(entry.row.header.path)
            if row is None or row.sealing or row.header.geometry != entry.row.header.geometry:
                continue
            # Of these, each has a later record, so no further one can join.
            full = (min(row.sealed, entry.row.records) - 1) // row.header.geometry.shard_records
            for known in entry.shards:
                if known.shard >= full:
                    continue
                path = shard_path(part.run, row.header, known.shard)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    info = path.lstat()
                    one = _Candidate(part, row.header, path, known, info)
                    if stat.S_ISREG(info.st_mode) and self._is_due(one):
                        yield one

    def _is_due(self, one: _Candidate) -> bool:
        if not self.policy.is_due(time.time() - one.info.st_mtime):
            return False
        if time.monotonic() - self._wrong.get(one.path, -_AGAIN_S) < _AGAIN_S:
            return False
        # Otherwise it is a stub, or waits for its upload.
        return one.info.st_size == one.known.nbytes and not _is_stub(one)

    def _move(self, one: _Candidate, settled: set[Path]) -> bool:
        """Move one shard. Return False, with a warning, if it stays."""
        failpoint("move.before_check")
        try:
            with RunLock.shared(one.part.run, _PATIENCE_S, is_there=True):
                problem = problem_of(one.part.bucket, one.key, one.path, one.info, one.known, one.header)
                if problem:
                    self.refused += 1
                    self._wrong[one.path] = time.monotonic()
                    logger.warning("%s stays on this disk: %s", one.path, problem)
                    return False
                failpoint("move.after_check")
                _settle(one, settled)
                _replace(one)
        except (StoreBusy, FileNotFoundError) as error:
            # The run, or the series, was removed in the meantime.
            logger.info("%s is not moved: %s", one.path, error)
            return False
        self.shards += 1
        self.nbytes += one.info.st_size
        self.on_moved(one.part.run, one.info)
        return True


class _Needed:
    """The bytes that are still to be freed."""

    def __init__(self, nbytes: float, target: float | None) -> None:
        self._nbytes, self._target = nbytes, target

    @classmethod
    def of(cls, policy: MovePolicy, found: Sequence[_Candidate]) -> _Needed:
        """Return what a policy wants to be freed."""
        if policy.at is None or not found:
            return cls(float("inf"), None)
        used, total = used_fraction(found[0].part.run)
        return cls((used - policy.down_to) * total, policy.down_to)

    def is_met(self, one: _Candidate) -> bool:
        """Return whether enough is freed. Others may have freed some, too."""
        if self._nbytes <= 0:
            return True
        return self._target is not None and used_fraction(one.part.run)[0] <= self._target

    def count(self, nbytes: int) -> None:
        """Count freed bytes."""
        self._nbytes -= nbytes


def _is_stub(one: _Candidate) -> bool:
    if one.info.st_size > MAX_STUB_NBYTES:
        return False
    try:
        return moved_shard(one.part.run, one.path) is not None
    except StoreError:
        # A damaged one is left to `capd verify`.
        return True


def _settle(one: _Candidate, settled: set[Path]) -> None:
    """Make the catalog and the documents of a series durable, once in a call."""
    series = one.part.run / one.header.path
    if series in settled:
        return
    catalog = node_directory(one.part.run, one.part.node) / CATALOG_NAME
    journal = catalog.with_name(f"{CATALOG_NAME}-wal")
    documents = {series / "zarr.json", series / "data" / "zarr.json", series, series / "data"}
    sync_paths({catalog, *documents} | ({journal} if journal.exists() else set()), one.part.run)
    settled.add(series)


def _replace(one: _Candidate) -> None:
    """Replace a shard by its stub."""
    directory = node_directory(one.part.run, one.part.node)
    stub = encode_stub(MovedShard(one.part.bucket.address, one.key, one.known.nbytes, one.known.crc32c))
    # Its own name, because a process that was not killed may do the same.
    temporary = directory / STUB_GLOB.replace("*", f"{os.getpid()}-{time.monotonic_ns()}")
    try:
        new_file(temporary, [stub])
        sync_paths([temporary], directory)
        failpoint("move.after_stub")
        now = one.path.lstat()
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (
            one.info.st_ino, one.info.st_size, one.info.st_mtime_ns
        ):  # fmt: skip
            raise FileNotFoundError(f"{one.path} was replaced in the meantime")
        rename(temporary, one.path)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(temporary, missing_ok=True)
        raise
    failpoint("move.after_rename")
    sync_paths([one.path.parent], directory)
    failpoint("move.after_sync")
