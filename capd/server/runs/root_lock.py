"""The root lock: one daemon per (store root, node), and the note that the owner writes into the lock file.

The lock is `flock` on `<root>/.capd-<node>.lock`. The kernel therefore releases it when its owner ends, however that
happens. The file holds one JSON object: the owner's pid and endpoint for messages, and the run that the daemon named
itself. After a crash, ranks without a run of their own join the running ranks in this run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from capd.errors import NO_SPACE, StoreBusy, StoreError, StoreFull
from capd.space import what_is_full

__all__ = ["OwnerNote", "RootLock", "owner_of", "reading_lock"]

_MAX_NOTE_NBYTES = 1 << 20


class OwnerNote(msgspec.Struct, kw_only=True):
    """The note of a store root's owner in the lock file.

    Attributes:
        assigned_run: The run that this daemon named; empty after an orderly shutdown.
    """

    pid: int = 0
    endpoint: str = ""
    assigned_run: str = ""


class RootLock:
    """The exclusive ownership of a store root on this node."""

    def __init__(self, root: Path, node: str) -> None:
        """Create `root` if needed and lock it.

        Raises:
            StoreBusy: Another daemon holds the lock. The message names its pid and endpoint.
            StoreError: The directory or the lock file cannot be used.
        """
        self.path = root / f".capd-{node}.lock"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._unusable(root, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            note = _read_note(self._fd)
            os.close(self._fd)
            if not isinstance(error, BlockingIOError):
                raise StoreError(f"cannot lock {self.path}: {error.strerror or error}") from error
            raise _busy(root, note) from None
        # The note of an earlier daemon that did not stop in order.
        self.previous = _read_note(self._fd)
        self.note = OwnerNote(pid=os.getpid())
        try:
            self.write()
        except OSError as error:
            os.close(self._fd)
            raise self._unusable(root, error) from error

    @staticmethod
    def _unusable(root: Path, error: OSError) -> StoreError:
        if error.errno in NO_SPACE:
            return StoreFull(
                f"cannot use store {root}: {what_is_full(error, root)}, or choose another --store"
            )
        remedy = "choose another --store"
        # A service of systemd sees a read-only file system but for its own directories.
        if error.errno in (errno.EROFS, errno.EACCES) and "INVOCATION_ID" in os.environ:
            remedy = f"make it for the unit's User= and name it in the unit, as in ReadWritePaths={root}"
        return StoreError(f"cannot use store {root}: {error.strerror or error}; {remedy}")

    def write(self) -> None:
        """Write `note` to the file. A crash in between leaves the note and an unread rest of the old one."""
        payload = msgspec.json.encode(self.note) + b"\n"
        os.pwrite(self._fd, payload, 0)
        os.ftruncate(self._fd, len(payload))

    def release(self, *, keep_note: bool = False) -> None:
        """Empty the file and release the lock, at the end of an orderly shutdown.

        The file itself stays: if a lock file is removed, two owners can lock two different files.

        Args:
            keep_note: Keep the run that an earlier daemon named, for the next daemon.
        """
        if self._fd >= 0:
            if keep_note and self.previous.assigned_run:
                self.note = OwnerNote(assigned_run=self.previous.assigned_run)
                self.write()
            else:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def reading_lock(root: Path, node: str) -> Iterator[None]:
    """Keep daemons from a store root without writing to it. Raises StoreBusy where one owns it."""
    try:
        fd = os.open(root / f".capd-{node}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no daemon was ever there, or nobody could lock it
        yield
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(root, _read_note(fd)) from None
        yield
    finally:
        os.close(fd)


def owner_of(root: Path, node: str) -> OwnerNote:
    """Return the note of the daemon of a node, which is empty after an orderly end, and stays after a kill."""
    try:
        fd = os.open(root / f".capd-{node}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return OwnerNote()
    try:
        return _read_note(fd)
    finally:
        os.close(fd)


def _busy(root: Path, note: OwnerNote) -> StoreBusy:
    where = f" on {note.endpoint}" if note.endpoint else ""
    return StoreBusy(
        f"store {root} is owned by another daemon (pid {note.pid or 'unknown'}{where}); "
        f"use that one, stop it, or choose another --store"
    )


def _read_note(fd: int) -> OwnerNote:
    try:
        line, _, _ = os.pread(fd, _MAX_NOTE_NBYTES, 0).partition(b"\n")
        return msgspec.json.decode(line, type=OwnerNote)
    except (OSError, msgspec.DecodeError):
        return OwnerNote()
