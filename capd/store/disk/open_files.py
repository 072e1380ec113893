"""The spool's open files: few descriptors for thousands of files, and what of them is not yet durable.

In a durable store every write is noted until the next group sync. A file whose sync failed is never trusted
again, because the kernel marks what it could not write as clean: its frames are checked, copied to a new file
and synced there, and that file takes the name.
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
    rename,
    sync_data,
    sync_paths,
    truncate,
    unlink,
)
from capd.store.format.frames import payload_is_sound, walk

__all__ = ["LostWrites", "OpenFiles", "rewrite"]

logger = logging.getLogger(__name__)


class LostWrites(StoreError):
    """A file does not hold what was written to it any more, after its sync failed; a restart reads what there is."""


class OpenFiles:
    """Keeps at most `limit` files open for reading and writing, least recently used closed first.

    durable: remember what was written since the last `sync`.
    """

    def __init__(self, limit: int, *, durable: bool) -> None:
        self._limit, self.durable = max(1, limit), durable
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._unsynced: dict[Path, tuple[int, int]] = {}  # durable up to … written up to
        self._directories: set[Path] = set()
        # Their sync failed: what the kernel calls clean need not be on disk.
        self._doubtful: set[Path] = set()

    def get(self, path: Path) -> int:
        """A descriptor of `path`, opened if need be (never created)."""
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
        """`path` is new, or has a new file behind its name, written up to `end`."""
        if self.durable:
            self._unsynced[path] = (0, end)
            self._directories.add(path.parent)

    def adopted(self, path: Path, end: int) -> None:
        """`path` stood there at the start: it may not be durable, and nothing of it is ever cut off."""
        if self.durable:
            self._unsynced[path] = (end, end)
            self._directories.add(path.parent)

    def wrote(self, path: Path, start: int, end: int) -> None:
        """`path` was appended to from `start` up to `end`."""
        if self.durable:
            self._unsynced[path] = (self._unsynced.get(path, (start, end))[0], end)

    def distrust(self, paths: Iterable[Path]) -> None:
        """The sync of these files failed: they are written anew before anything relies on them."""
        self._doubtful.update(paths)

    def distrust_unsynced(self) -> None:
        """The same of everything that was noted."""
        self._doubtful.update(self._unsynced)

    def is_doubtful(self, path: Path) -> bool:
        """Whether a sync of the file failed that bears this name."""
        return path in self._doubtful

    def sync(self, root: Path) -> None:
        """Make everything that was noted durable: one by one when few, else with one syncfs.

        After a failure all of the files are written anew. Raises OSError or StoreError if that fails, too;
        then what was written since the last sync is cut off, as far as the disk still obeys.
        """
        if not self._unsynced:
            return
        try:
            self._sync(root)
        except OSError as error:
            logger.warning("sync failed (%s): writing %d files anew", error, len(self._unsynced))
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
        self._raise_doubts()  # a file may have made room for another one meanwhile
        sync_paths(self._directories, root)

    def _raise_doubts(self) -> None:
        if not self._doubtful.isdisjoint(self._unsynced):
            raise OSError(errno.EIO, "a file could not be synced when it was closed")

    def cut_back(self) -> None:
        """Cut off what was written since the last sync, as far as the disk still obeys."""
        for path, (start, _) in self._unsynced.items():
            with contextlib.suppress(OSError):
                truncate(path, start)

    def forget(self, path: Path) -> None:
        """Close the descriptor of `path`, if open, without a sync; the file goes or gets another name."""
        self._unsynced.pop(path, None)
        self.replaced(path)

    def replaced(self, path: Path) -> None:
        """Another file stands behind the name `path` now, durable, or none."""
        self._doubtful.discard(path)
        if (fd := self._open.pop(path, None)) is not None:
            os.close(fd)

    def close(self) -> None:
        """Close everything."""
        while self._open:
            self._close(*self._open.popitem())

    def _close(self, path: Path, fd: int) -> None:
        try:
            if path in self._unsynced:  # an error in writing back later could go unseen
                sync_data(fd)
        except OSError as error:
            logger.warning("%s: %s", path, error)
            self._doubtful.add(path)
        finally:
            os.close(fd)


def rewrite(ends: Mapping[Path, int], files: OpenFiles, root: Path) -> None:
    """Copy the frames of journals up to `ends` to new files, durably, and let these take the names.

    Raises LostWrites if a frame does not match its checksum any more, OSError if the new files cannot be made.
    """
    for path, end in ends.items():
        temporary = path.with_suffix(".tmp")
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                copy_range(source, target, end)
                _check(target, path, end)
                sync_data(target)
            finally:
                os.close(target)
        except BaseException:
            with contextlib.suppress(OSError):
                unlink(temporary, missing_ok=True)
            raise
        finally:
            os.close(source)
        failpoint("rewrite.before_rename")
        rename(temporary, path)
        files.replaced(path)
    sync_paths({path.parent for path in ends}, root)


def _check(fd: int, path: Path, end: int) -> None:
    at = 0
    for frame in walk(fd, 0, end):
        if not payload_is_sound(frame, os.pread(fd, frame.nbytes, frame.offset)):
            break
        at = frame.offset + frame.nbytes
    if at != end:
        raise LostWrites(f"{path} lost what was written to it behind byte {at} when a sync failed")
