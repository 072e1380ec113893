"""The spool of the recorder: where segments lie, in memory first and then on disk, and how many bytes they take.

A segment is named after its attempt and iteration, in a directory of the run. An iteration leaves whole, with all of
its segments.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from capd.server.recorder.held_record import HeldIdentity, HeldRecord
from capd.server.recorder.segment import HeldBytes, HeldFile, frame_nbytes
from capd.server.recorder.window import HeldIteration
from capd.store.disk.files import make_directory, unlink
from capd.store.keeps.held_files import (
    elsewhere_of,
    held_name,
    left_segments,
    memory_directory,
    note_elsewhere,
    spool_place,
    window_directory,
)
from capd.window.place import memory_limit
from capd.window.settings import WindowSettings

__all__ = ["DiskRefused", "HeldFiles"]

logger = logging.getLogger(__name__)

# Files that stay open. Others are opened again when they are read.
_MOST_OPEN = 64


class DiskRefused(Exception):
    """The disk budget takes no more of the spool."""


class HeldFiles:
    """The segments of all runs. One thread appends, and any thread may do the rest.

    Attributes:
        memory_nbytes: The bytes of the segments in memory.
        disk_nbytes: The bytes of the segments on disk.
    """

    def __init__(
        self, settings: WindowSettings, root: Path, node: str, refusal: Callable[[int], str | None]
    ) -> None:
        """Find the place in memory, and clear it of runs that are gone.

        refusal: admits bytes to the disk, or returns why it does not.
        """
        self._settings, self._root, self._node, self._refusal = settings, root, node, refusal
        self.memory_nbytes = self.disk_nbytes = 0
        # It guards the two, and is never held while a file is touched.
        self._lock = threading.Lock()
        self._memory = memory_directory(root, node)
        self._memory_limit = memory_limit(settings) if _private(self._memory) else 0
        # With the links of its path followed, it is the same as in the note of an earlier daemon.
        self._directory = None if settings.directory is None else Path(os.path.realpath(settings.directory))
        self._elsewhere = None if self._directory is None else self._directory / spool_place(root, node)
        self._numbers = itertools.count()
        self._open: OrderedDict[Path, HeldFile] = OrderedDict()
        self._clear()

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        return self.memory_nbytes + self.disk_nbytes

    def reserve(self, nbytes: int) -> bool | None:
        """Count bytes that a record will take. Return whether in memory; None if [window] bytes has no room."""
        with self._lock:
            if self.nbytes + nbytes > self._settings.nbytes:
                return None
            in_memory = self.memory_nbytes + nbytes <= self._memory_limit
        self.count(nbytes, in_memory=in_memory)
        return in_memory

    def count(self, nbytes: int, *, in_memory: bool) -> None:
        """Count bytes that are taken, or given back."""
        with self._lock:
            if in_memory:
                self.memory_nbytes += nbytes
            else:
                self.disk_nbytes += nbytes

    def left_runs(self) -> list[str]:
        """Return the runs of which an earlier daemon left segments."""
        runs = {path.parent.name for place in self._own() for path in place.glob("*/*.held")}
        found = self._root.glob(f"*.zarr/.capd/node={self._node}/window/*.held")
        runs |= {path.parents[3].name.removesuffix(".zarr") for path in found}
        for note in self._root.glob(f"*.zarr/.capd/node={self._node}/window/elsewhere"):
            run = note.parents[3]
            if next(left_segments(run, self._node), None) is not None:
                runs.add(run.name.removesuffix(".zarr"))
        return sorted(run for run in runs if self._run(run).is_dir())

    def left_segments(self, run_id: str) -> list[tuple[int, int, HeldFile]]:
        """Return the segments of a run that an earlier daemon left: attempt, iteration, and the file."""
        found = []
        in_run = window_directory(self._run(run_id), self._node)
        # An earlier daemon may have had another directory.
        noted = elsewhere_of(self._run(run_id), self._node)
        outside = {*self._own(), *([] if noted is None else [noted])}
        places = [*(place / run_id for place in outside), in_run]
        for path in (path for place in places for path in _files(place)):
            name = held_name(path.name)
            if name is None:
                continue
            try:
                segment = HeldFile(path, in_memory=path.is_relative_to(self._memory), is_new=False)
            except OSError as error:
                logger.error("[window] %s cannot be read, and stays: %s", path, error)
                continue
            segment.rest()
            found.append((*name, segment))
        return sorted(found, key=lambda one: (one[0], one[1], one[2].path.name))

    def append(
        self,
        run_id: str,
        held: HeldIteration,
        record: HeldRecord,
        description: bytes,
        pieces: Callable[[], Iterable[bytes]],
        *,
        in_memory: bool,
    ) -> HeldBytes:
        """Append a record whose bytes are reserved. They are given back if that fails.

        Raises:
            DiskRefused: The disk may take no more.
            OSError: A file cannot be created or written.
        """
        try:
            return self._append(run_id, held, record, description, pieces, in_memory=in_memory)
        except OSError as error:
            if not in_memory or error.errno != errno.ENOSPC:
                raise
        with self._lock:
            self._memory_limit = self.memory_nbytes
        logger.warning("[window] others have filled %s, so the rest is held on disk", self._memory)
        self.count(frame_nbytes(description, record.descriptor.nbytes), in_memory=False)
        return self._append(run_id, held, record, description, pieces, in_memory=False)

    def _append(
        self,
        run_id: str,
        held: HeldIteration,
        record: HeldRecord,
        description: bytes,
        pieces: Callable[[], Iterable[bytes]],
        *,
        in_memory: bool,
    ) -> HeldBytes:
        size = frame_nbytes(description, record.descriptor.nbytes)
        segment = held.segments[-1] if held.segments else None
        try:
            if not in_memory and (why := self._refusal(size)) is not None:
                raise DiskRefused(why)
            if segment is None or not segment.takes(size, in_memory=in_memory):
                segment = self._new(run_id, held, in_memory=in_memory)
            self._use(segment)
            found = segment.append(HeldIdentity(record.client, record.sequence), description, pieces())
        except BaseException:
            self.count(-size, in_memory=in_memory)
            if segment is not None and segment not in held.segments:
                self.remove(segment)
            raise
        if segment not in held.segments:
            held.segments.append(segment)
        return found

    def remove(self, segment: HeldFile) -> None:
        """Delete a segment. A failure is logged; the next start finds the file again."""
        self.count(-segment.nbytes, in_memory=segment.in_memory)
        self._open.pop(segment.path, None)
        try:
            segment.remove()
        except OSError as error:
            logger.error("[window] %s cannot be deleted: %s", segment.path, error)
        _remove_empty(segment.path.parent)

    def close(self) -> None:
        """Remove the directories outside of the runs, if nothing is held there."""
        for place in self._own():
            _remove_empty(place)

    def _own(self) -> list[Path]:
        """Return the directories of the spool that lie outside of the runs."""
        return [self._memory] if self._elsewhere is None else [self._memory, self._elsewhere]

    def _clear(self) -> None:
        """Delete what is held of runs that were removed, and empty directories."""
        for place in self._own():
            for directory in _files(place):
                if not self._run(directory.name).is_dir():
                    for path in _files(directory):
                        if held_name(path.name) is not None:
                            with contextlib.suppress(OSError):
                                unlink(path)
                _remove_empty(directory)

    def _new(self, run_id: str, held: HeldIteration, *, in_memory: bool) -> HeldFile:
        directory = self._memory / run_id if in_memory else self._disk(run_id)
        while True:
            path = directory / f"a{held.attempt}-i{held.iteration}-{next(self._numbers):06}.held"
            try:
                return HeldFile(path, in_memory=in_memory)
            except FileNotFoundError:
                if not in_memory and self._directory is not None:
                    note_elsewhere(self._run(run_id), self._node, self._directory)
                make_directory(directory)
            except FileExistsError:
                # An earlier daemon had this number.
                continue

    def _use(self, segment: HeldFile) -> None:
        self._open[segment.path] = segment
        self._open.move_to_end(segment.path)
        if len(self._open) > _MOST_OPEN:
            _, oldest = self._open.popitem(last=False)
            oldest.rest()

    def _run(self, run_id: str) -> Path:
        return self._root / f"{run_id}.zarr"

    def _disk(self, run_id: str) -> Path:
        if self._elsewhere is None:
            return window_directory(self._run(run_id), self._node)
        return self._elsewhere / run_id


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _private(directory: Path) -> bool:
    """Make a directory in shared memory. Return whether it and its parent belong to this user alone."""
    for place in (directory.parent, directory):
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.lstat()
        except OSError as error:
            logger.warning("[window] %s cannot be used, so nothing is held in memory: %s", place, error)
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            logger.warning("[window] %s belongs to others, so nothing is held in memory", place)
            return False
    return True
