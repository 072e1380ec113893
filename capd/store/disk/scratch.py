"""A file without a name that bytes gather in before they are a record: it goes with the last that holds it.

Its space is taken when it is made, so that a full disk is an error then, and no write or read of it fails for want
of space later. It is read, not mapped: where the disk fails, a read is an error, and a page of a mapping is the end of
the process.
"""

from __future__ import annotations

import errno
import os
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from capd.store.disk.files import pwrite_all, unlink

__all__ = ["Scratch", "ScratchArray"]

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

    def read(self, first: int, nbytes: int) -> bytearray:
        """A copy of some of it. Raises OSError, also where the file is shorter than it was made."""
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        while done < nbytes:
            count = os.preadv(self._fd, [view[done:]], first + done)
            if not count:
                raise OSError(errno.EIO, f"a scratch file ends {nbytes - done} bytes too early")
            done += count
        return data

    def as_array(self, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> ScratchArray:
        """Its bytes (C order) as an array of their stored dtype, of which slices are read when they are taken."""
        return ScratchArray(self, stored, shape)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ScratchArray:
    """A record in a scratch file. Of a slice everything from its first element to its last is read, which for a
    chunk of a series is the chunk."""

    def __init__(self, file: Scratch, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
        self._file, self._stored, self._shape = file, stored, shape

    def __getitem__(self, slices: tuple[slice, ...]) -> NDArray[np.generic]:
        """A copy of the block between non-empty slices without strides, one per axis. Raises OSError."""
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
        if error.errno not in _NOT_HERE:
            raise
    path = directory / "scratch.tmp"  # recovery deletes it should the process end between the two steps
    unlink(path, missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    unlink(path)
    return fd
