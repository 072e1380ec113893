"""A file without a name that collects the bytes of a record before its commit. Its last descriptor deletes it.

Its space is allocated when it is created. A full disk is therefore an error at that point, and no later access fails
for lack of space. The file is read, not mapped. If the disk fails, a read raises an error, but an access to a mapped
page would kill the process.
"""

from __future__ import annotations

import errno
import os
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from capd.store.disk.files import pwrite_all, unlink

__all__ = ["Scratch", "ScratchArray", "StoredBytes"]

# The errors of file systems without O_TMPFILE.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})


class Scratch:
    """A file of `nbytes` ≥ 1 in `directory`, mode 0600, filled from the start.

    Raises:
        OSError: There is not enough space.
    """

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
        """Append bytes. Raises OSError; no byte of `data` counts then."""
        pwrite_all(self._fd, [data], self.filled)
        self.filled += len(data)

    def read(self, first: int, nbytes: int) -> bytearray:
        """Return a copy of `nbytes` from offset `first`. Raises OSError, also if the file has become shorter."""
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        while done < nbytes:
            count = os.preadv(self._fd, [view[done:]], first + done)
            if not count:
                raise OSError(errno.EIO, f"a scratch file ends {nbytes - done} bytes too early")
            done += count
        return data

    def as_array(self, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> ScratchArray:
        """Return the bytes (C order) as an array of their stored dtype. A slice is read when it is taken."""
        return ScratchArray(self, stored, shape)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StoredBytes(Protocol):
    """The bytes of a record in a file."""

    nbytes: int

    def read(self, first: int, nbytes: int) -> bytearray:
        """Return a copy of `nbytes` from offset `first`. Raises OSError."""

    def as_array(self, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> ScratchArray:
        """Return the bytes (C order) as an array of their stored dtype. A slice is read when it is taken."""


class ScratchArray:
    """A record in a file.

    A slice reads everything from its first element to its last. For a chunk of a series this is exactly the chunk.
    """

    def __init__(self, file: StoredBytes, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
        self._file, self._stored, self._shape = file, stored, shape

    def __getitem__(self, slices: tuple[slice, ...]) -> NDArray[np.generic]:
        """Return a copy of the block between non-empty slices without strides, one per axis. Raises OSError."""
        if not slices:
            return np.frombuffer(self._file.read(0, self._stored.itemsize), self._stored).reshape(())
        split = next((at for at, part in enumerate(slices) if part.stop - part.start > 1), len(slices) - 1)
        row = self._shape[split + 1 :]
        outer = 0
        for part, extent in zip(slices[:split], self._shape[:split], strict=True):
            outer = outer * extent + part.start
        first = (outer * self._shape[split] + slices[split].start) * prod(row)
        rows = slices[split].stop - slices[split].start
        itemsize = self._stored.itemsize
        read = self._file.read(first * itemsize, rows * prod(row) * itemsize)
        block = np.frombuffer(read, self._stored).reshape((1,) * split + (rows, *row))
        return block[(slice(None),) * (split + 1) + slices[split + 1 :]]


def _nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    # Recovery deletes this file if the process ends before the unlink.
    path = directory / "scratch.tmp"
    unlink(path, missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    unlink(path)
    return fd
