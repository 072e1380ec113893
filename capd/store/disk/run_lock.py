"""The lock of a run: writers share it, and a removal holds it alone.

The lock is a byte-range lock of the open file `<run>/.capd/lock` (F_OFD_SETLK). The kernel releases it when its owner
ends, however that happens. It works between the nodes of a cluster wherever the file system has byte-range locks.
Readers take no lock: an open file stays readable after its removal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from capd.errors import StoreBusy, StoreError
from capd.store.disk.files import make_directory

__all__ = ["RunLock", "is_written"]

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("@hhqqi0q")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_RETRY_S = 0.02
PATIENCE_S = 30.0


class RunLock:
    """A held lock of one run. `release` gives it back."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def shared(cls, run: Path, patience_s: float = PATIENCE_S, *, is_there: bool = False) -> RunLock:
        """Return the lock of a writer.

        Args:
            run: The run.
            patience_s: The time to wait for a removal, in seconds. It holds the lock for seconds at most.
            is_there: Whether the run must exist. Otherwise its directory is made.

        Raises:
            StoreBusy: A removal held the lock for too long (retry).
            StoreError: The file system has no locks.
            OSError: The lock file cannot be made, or the run is not there.
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                fd = _made(run, is_there=is_there)
            except FileNotFoundError:
                # A removal may take the directory along before its lock file is opened.
                if is_there or time.monotonic() >= until:
                    raise
                time.sleep(_RETRY_S)
                continue
            try:
                # After the wait, the run may have been removed with its lock file.
                if _lock(fd, fcntl.F_RDLCK, run) and _is_named(fd, run):
                    return cls(fd)
                if time.monotonic() >= until:
                    raise StoreBusy(f"{run} is being removed; try again when `capd rm` has ended", retry=True)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            time.sleep(_RETRY_S)

    @classmethod
    def alone(cls, run: Path, patience_s: float = 0.0) -> RunLock:
        """Return the lock of a removal.

        Args:
            run: The run.
            patience_s: The time to wait for a writer that is about to end, in seconds.

        Raises:
            StoreBusy: A writer has the run open, or another command removes it.
            StoreError: The file system has no locks.
            OSError: The lock file cannot be made, or the run is not there.
        """
        until = time.monotonic() + patience_s
        fd = _made(run, is_there=True)
        try:
            while not _lock(fd, fcntl.F_WRLCK, run):
                if time.monotonic() >= until:
                    raise StoreBusy(
                        f"{run} is open: a daemon or another command is writing it; try again after it",
                        retry=True,
                    )
                time.sleep(_RETRY_S)
            if not _is_named(fd, run):
                raise StoreBusy(f"{run} was removed by another command in the meantime", retry=True)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_written(run: Path) -> bool:
    """Return whether a writer or a removal holds the lock of a run. Takes no lock itself."""
    try:
        fd = _opened(run, os.O_RDWR)
    except OSError:
        # No writer of this version was ever there.
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
        return found != fcntl.F_UNLCK
    except OSError:
        return False
    finally:
        os.close(fd)


def _made(run: Path, *, is_there: bool) -> int:
    """Open the lock file, and make it and its directory if they are missing."""
    if is_there:
        # Without parents: a run that was just removed is not made again.
        (run / ".capd").mkdir(mode=0o700, exist_ok=True)
    else:
        make_directory(run / ".capd")
    return _opened(run, os.O_RDWR | os.O_CREAT)


def _opened(run: Path, flags: int) -> int:
    return os.open(run / ".capd" / "lock", flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _lock(fd: int, kind: int, run: Path) -> bool:
    """Take the lock. Return False if another owner has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in _NO_LOCKS:
            raise StoreError(
                f"cannot lock {run}: its file system has no locks ({error.strerror}); mount it with locks, or "
                "choose another --store"
            ) from error
        raise
    return True


def _is_named(fd: int, run: Path) -> bool:
    """Return whether the lock file still is the run's: a removed run takes its lock file along."""
    mine = os.fstat(fd)
    try:
        found = (run / ".capd" / "lock").stat()
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)
