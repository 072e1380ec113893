"""One daemon per (store root, node): the root lock, and the note its owner leaves in it.

The lock is `flock` on `<root>/.capd-<node>.lock`, so the kernel releases it with its owner, however that
ends. The file holds one JSON object: the owner's pid and endpoint for messages, and the run the daemon
named by itself, so that after a crash ranks without a run of their own join those that go on in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from capd.errors import NO_SPACE, StoreBusy, StoreError, StoreFull
from capd.space import what_is_full

__all__ = ["OwnerNote", "RootLock", "reading_lock"]

_MAX_NOTE_NBYTES = 1 << 20


class OwnerNote(msgspec.Struct, kw_only=True):
    """What the owner of a store root writes into the lock file.

    assigned_run: the run this daemon named, empty after an orderly shutdown.
    """

    pid: int = 0
    endpoint: str = ""
    assigned_run: str = ""


class RootLock:
    """Exclusive ownership of a store root on this node."""

    def __init__(self, root: Path, node: str) -> None:
        """Create `root` if needed and lock it.

        Raises StoreBusy when another daemon holds it (the message names its pid and endpoint) and
        StoreError when the directory or the lock file cannot be used.
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
        self.previous = _read_note(self._fd)  # what a daemon that did not end in order left behind
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
        return StoreError(f"cannot use store {root}: {error.strerror or error}; choose another --store")

    def write(self) -> None:
        """Write `note` to the file; a crash in between leaves the note, with a rest that is not read."""
        payload = msgspec.json.encode(self.note) + b"\n"
        os.pwrite(self._fd, payload, 0)
        os.ftruncate(self._fd, len(payload))

    def release(self, *, keep_note: bool = False) -> None:
        """End of an orderly shutdown: empty the file and give up the lock. The file itself stays, because
        removing a lock file lets two owners lock two different files.

        keep_note: leave the run that a daemon before had named, for the one that comes next."""
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
