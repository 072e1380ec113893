"""The open files of a spool: few descriptors for thousands of files, and the record of unsynced writes.

In a durable store every write is noted until the next group sync. A file whose sync failed is never trusted again,
because the kernel marks lost pages as clean. Its frames are checked, copied to a new file and synced there. The new
file then takes the name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from capd.errors import StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import (
    GROUP_SYNC_ABOVE,
    copy_range,
    opened,
    rename,
    sync_data,
    sync_paths,
    truncate,
    unlink,
)
from capd.store.format.frames import sound_end

__all__ = ["LostWrites", "OpenFiles", "rewrite"]

logger = logging.getLogger(__name__)


class LostWrites(StoreError):
    """A file lost data after its sync failed. A restart reads the remaining data."""


class OpenFiles:
    """The open files of one spool, at most `limit` of them. The least recently used one is closed first."""

    def __init__(self, limit: int, *, durable: bool) -> None:
        """Start without open files. Only a durable store notes the writes since the last `sync`."""
        self._limit, self.durable = max(1, limit), durable
        self._open: OrderedDict[Path, int] = OrderedDict()
        # Path → (end of the durable bytes, end of the written bytes).
        self._unsynced: dict[Path, tuple[int, int]] = {}
        self._directories: set[Path] = set()
        # The sync of these files failed: their clean pages are perhaps not on disk.
        self._doubtful: set[Path] = set()

    def get(self, path: Path) -> int:
        """Return a descriptor of `path`. The file is opened if necessary, but never created."""
        fd = self._open.get(path)
        if fd is None:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._open[path] = fd
            while len(self._open) > self._limit:
                self._close(*self._open.popitem(last=False))
        else:
            self._open.move_to_end(path)
        return fd

    def created(self, path: Path, end: int) -> None:
        """Note a file that is new, or that replaced another file of this name, and is written up to `end`."""
        if self.durable:
            self._unsynced[path] = (0, end)
            self._directories.add(path.parent)

    def adopted(self, path: Path, end: int) -> None:
        """Note a file that existed at the start. It may not be durable, and it is never truncated."""
        if self.durable:
            self._unsynced[path] = (end, end)
            self._directories.add(path.parent)

    def wrote(self, path: Path, start: int, end: int) -> None:
        """Note that bytes from `start` to `end` were appended to `path`."""
        if self.durable:
            self._unsynced[path] = (self._unsynced.get(path, (start, end))[0], end)

    def distrust(self, paths: Iterable[Path]) -> None:
        """Note that the sync of these files failed. They are written again before anything relies on them."""
        self._doubtful.update(paths)

    def distrust_unsynced(self) -> None:
        """Distrust all files that have unsynced writes."""
        self._doubtful.update(self._unsynced)

    def is_doubtful(self, path: Path) -> bool:
        """Return whether a sync of the file of this name failed."""
        return path in self._doubtful

    def sync(self, root: Path) -> None:
        """Make all noted writes durable: one by one if they are few, else with one syncfs.

        After a failure all of the files are written again. If that fails, too, the writes since the last sync are cut
        off, as far as the disk allows it.

        Raises:
            OSError: The new files cannot be written.
            StoreError: A file lost data.
        """
        if not self._unsynced:
            return
        try:
            self._sync(root)
        except OSError as error:
            logger.warning("sync failed (%s): writing %d files again", error, len(self._unsynced))
            try:
                rewrite({path: end for path, (_, end) in self._unsynced.items()}, self, root)
            except (OSError, StoreError):
                self.cut_back()
                raise
        self._unsynced.clear()
        self._directories.clear()
        failpoint("sync.after")

    def _sync(self, root: Path) -> None:
        failpoint("sync.before")
        self._raise_doubts()
        if len(self._unsynced) > GROUP_SYNC_ABOVE:
            sync_paths(self._unsynced, root)
        else:
            for path in self._unsynced:
                sync_data(self.get(path))
        # `get` may have closed a file in the meantime.
        self._raise_doubts()
        sync_paths(self._directories, root)

    def _raise_doubts(self) -> None:
        if not self._doubtful.isdisjoint(self._unsynced):
            raise OSError(errno.EIO, "a file could not be synced when it was closed")

    def cut_back(self) -> None:
        """Cut off the writes since the last sync, as far as the disk allows it."""
        for path, (start, _) in self._unsynced.items():
            with contextlib.suppress(OSError):
                truncate(path, start)

    def forget(self, path: Path) -> None:
        """Close the descriptor of `path` without a sync, because the file will be deleted or renamed."""
        self._unsynced.pop(path, None)
        self.replaced(path)

    def replaced(self, path: Path) -> None:
        """Note that `path` now names a different, durable file, or none."""
        self._doubtful.discard(path)
        if (fd := self._open.pop(path, None)) is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._close(*self._open.popitem())

    def _close(self, path: Path, fd: int) -> None:
        try:
            # A later write error could remain unnoticed.
            if path in self._unsynced:
                sync_data(fd)
        except OSError as error:
            logger.warning("%s cannot be synced: %s", path, error)
            self._doubtful.add(path)
        finally:
            os.close(fd)


def rewrite(ends: Mapping[Path, int], files: OpenFiles, root: Path) -> None:
    """Copy the frames of journals to new files, durably, and give these the names of the journals.

    `ends` holds the number of bytes to copy. `root` is a directory of the same file system.

    Raises:
        LostWrites: A frame does not match its checksum any more.
        OSError: The new files cannot be written.
    """
    for path, end in ends.items():
        temporary = path.with_suffix(".tmp")
        try:
            with opened(path) as source, opened(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as target:
                copy_range(source, target, end)
                _check(target, path, end)
                sync_data(target)
        except BaseException:
            with contextlib.suppress(OSError):
                unlink(temporary, missing_ok=True)
            raise
        failpoint("rewrite.before_rename")
        rename(temporary, path)
        files.replaced(path)
    sync_paths({path.parent for path in ends}, root)


def _check(fd: int, path: Path, end: int) -> None:
    if (at := sound_end(fd, end)) != end:
        raise LostWrites(f"{path} lost the data after byte {at} when a sync failed")
