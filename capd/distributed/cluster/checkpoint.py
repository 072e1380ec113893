"""A checkpoint: the log of the partial results that are there, so that a second call goes on with the others."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, Self

from capd.errors import ConfigError, StoreBusy
from capd.store.disk.files import sync_paths

__all__ = ["Checkpoint"]

LOG_NAME = "partials.log"
_MAGIC = b"capd checkpoint 1\n"
# The checksum of task, length and result; the task; the length.
_FRAME = struct.Struct("<IIQ")


class _Place(NamedTuple):
    offset: int
    length: int


class Checkpoint:
    """The log of one plan, held by one process. A result that a kill cut off is not there."""

    def __init__(self, directory: Path, plan: str) -> None:
        """Open or begin the log of a plan.

        Raises:
            ConfigError: The directory has the log of another plan, or something else.
            StoreBusy: Another process writes to it.
            OSError: It cannot be written.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / LOG_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "r+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreBusy(
                    f"another analysis writes the checkpoint {directory}; wait for it, or name another"
                ) from None
            self._places = self._read(plan.encode())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def tasks(self) -> frozenset[int]:
        """The tasks whose results are there."""
        return frozenset(self._places)

    def result(self, task: int) -> bytes:
        """Return the result of a task that is there."""
        offset, length = self._places[task]
        return os.pread(self._file.fileno(), length, offset)

    def add(self, task: int, result: bytes) -> None:
        """Append the result of a task. It is on the disk when this returns."""
        body = struct.pack("<IQ", task, len(result)) + result
        at = self._file.seek(0, os.SEEK_END)
        self._file.write(struct.pack("<I", zlib.crc32(body)) + body)
        self._sync()
        self._places[task] = _Place(at + _FRAME.size, len(result))

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, plan: bytes) -> dict[int, _Place]:
        whole = _MAGIC + plan
        head = self._file.read(len(whole))
        if len(head) < len(whole) and whole.startswith(head):
            # It is new, or a kill cut off its begin.
            self._file.write(whole[len(head) :])
            self._sync()
            sync_paths([self._path.parent], self._path.parent)
            return {}
        if not head.startswith(_MAGIC):
            raise ConfigError(f"{self._path} is no checkpoint; name another directory with --checkpoint")
        if head[len(_MAGIC) :] != plan:
            raise ConfigError(
                f"{self._path.parent} is the checkpoint of another plan: other records, formats or --task-bytes; name "
                "another directory, or remove it"
            )
        return self._frames()

    def _frames(self) -> dict[int, _Place]:
        found: dict[int, _Place] = {}
        size = os.fstat(self._file.fileno()).st_size
        good = self._file.tell()
        while good + _FRAME.size <= size:
            frame = self._file.read(_FRAME.size)
            checksum, task, length = _FRAME.unpack(frame)
            if length > size - good - _FRAME.size:
                break
            if zlib.crc32(self._file.read(length), zlib.crc32(frame[4:])) != checksum:
                break
            found[task] = _Place(good + _FRAME.size, length)
            good += _FRAME.size + length
        # A kill cut off the last one.
        self._file.truncate(good)
        return found
