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

from capd.errors import StoreBusy
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, read_series
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import new_file, rename, sync_paths, truncate, unlink
from capd.store.disk.layout import node_directory, shard_path
from capd.store.disk.run_lock import RunLock
from capd.store.format.frames import SeriesHeader
from capd.store.objects.bucket import Bucket
from capd.store.scan.moved_shard import (
    MAX_STUB_NBYTES,
    STUB_GLOB,
    MovedShard,
    encode_stub,
    is_mostly_hole,
)
from capd.store.segments.series_table import SeriesEntry, ShardObject
from capd.store.upload.checking import problem_of
from capd.store.upload.local_files import OpenShard
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
    # The bytes that are still to be freed once `at` has been reached; None before.
    _left: float | None = None

    def waits(self, run: Path, node: str) -> bool:
        """Return whether shards of a node's part may be due, as far as this disk tells. No object store is asked.

        Raises:
            StoreError: The catalog cannot be read.
            OSError: The disk refused.
        """
        return self._is_wanted(run) and any(True for _ in self._full_shards(run, node))

    def move(self, parts: Iterable[UploadedPart]) -> None:
        """Move the shards that are due, the oldest first.

        Raises:
            ObjectStoreError: An object store does not answer. The rest stays until the next call.
            StoreError: A catalog cannot be read.
            OSError: The disk refused.
        """
        found = [one for part in parts if self._is_wanted(part.run) for one in self._due(part)]
        found.sort(key=lambda one: one.info.st_mtime_ns)
        settled: set[Path] = set()
        for one in found:
            if self.is_stopping() or not self._is_wanted(one.part.run):
                return
            if self._move(one, settled) and self._left is not None and one.info.st_nlink == 1:
                # A reader may have the file open. Its space is then free later.
                self._left -= one.info.st_size

    def _is_wanted(self, run: Path) -> bool:
        """Return whether shards may go now. With `at`, from its mark on until enough is free."""
        if self.policy.at is None:
            return bool(self.policy)
        try:
            used, nbytes = used_fraction(run)
        except FileNotFoundError:
            return False
        if self._left is None and used >= self.policy.at:
            self._left = (used - self.policy.down_to) * nbytes
        if self._left is not None and (self._left <= 0 or used <= self.policy.down_to):
            self._left = None
        return self._left is not None

    def _full_shards(self, run: Path, node: str) -> Iterator[tuple[SeriesRow, int, Path, os.stat_result]]:
        """Yield the local shards of a part that no later record can join and that are old enough."""
        catalog = node_directory(run, node) / CATALOG_NAME
        if not catalog.is_file():
            # The run was removed.
            return
        with contextlib.closing(connect_read_only(catalog)) as database:
            rows = read_series(database)
        for row in rows:
            # Each of these shards has a later record. A row that is being sealed may still change.
            for number in () if row.sealing else range((row.sealed - 1) // row.header.geometry.shard_records):
                path = shard_path(run, row.header, number)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    info = path.lstat()
                    if self._is_due(path, info):
                        yield row, number, path, info

    def _is_due(self, path: Path, info: os.stat_result) -> bool:
        # What takes so little is a stub, or would free nothing.
        if not stat.S_ISREG(info.st_mode) or info.st_size <= MAX_STUB_NBYTES or is_mostly_hole(info):
            return False
        is_known_wrong = time.monotonic() - self._wrong.get(path, -_AGAIN_S) < _AGAIN_S
        return not is_known_wrong and self.policy.is_due(time.time() - info.st_mtime)

    def _due(self, part: UploadedPart) -> Iterator[_Candidate]:
        """Yield the shards of a part that may be moved."""
        for left in node_directory(part.run, part.node).glob(STUB_GLOB):
            unlink(left, missing_ok=True)
        uploaded = {
            entry.row.header.path: (entry.row, {one.shard: one for one in entry.shards})
            for entry in part.entries
        }
        for row, number, path, info in self._full_shards(part.run, part.node):
            there, shards = uploaded.get(row.header.path, (row, {}))
            if there.header.geometry != row.header.geometry:
                continue
            last = (there.records - 1) // row.header.geometry.shard_records
            known = shards.get(number)
            if known is None or number >= last or known.nbytes != info.st_size:
                # It waits for its upload.
                continue
            # A copy may have written the hole of a stub.
            if not _is_stub(path):
                yield _Candidate(part, row.header, path, known, info)

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


def _is_stub(path: Path) -> bool:
    with contextlib.suppress(OSError), OpenShard(path) as file:
        return file.is_stub
    return False


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
        truncate(temporary, one.info.st_size)
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
