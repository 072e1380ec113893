"""A file without a name that bytes gather in before they are a record: it goes with the last that holds it.

Its space is taken when it is made, so that a full disk is an error then, and no write or read of it fails for want
of space later.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from capd.store.files import pwrite_all, unlink

__all__ = ["Scratch"]

_NOT_HERE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})  # file systems without O_TMPFILE


class Scratch:
    """`nbytes` ≥ 1 in `directory`, mode 0600, filled from the front. Raises OSError where there is no room."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.filled = 0
        self._fd = _nameless(directory)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except BaseException:
            self.close()
            raise

    def append(self, data: memoryview) -> None:
        """Add bytes behind those that are there. Raises OSError; then nothing of them counts."""
        pwrite_all(self._fd, [data], self.filled)
        self.filled += len(data)

    def mapped(self) -> memoryview:
        """All of it, read-only; the file lives as long as the view does."""
        return memoryview(mmap.mmap(self._fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def close(self) -> None:
        """Let go of the file; views stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    path = directory / "scratch.tmp"  # recovery deletes it should the process end between the two steps
    unlink(path, missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    unlink(path)
    return fd
