"""The segment: a file of the spool with held records of one iteration, and the bytes of a record in it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from capd.server.recorder.held_record import (
    HEAD_NBYTES,
    MAGIC,
    NOBODY,
    FrameHead,
    HeldIdentity,
    HeldRecord,
    decode_record,
)
from capd.store.disk.files import pwrite_all, unlink
from capd.store.disk.scratch import ScratchArray
from capd.store.format.codecs import crc32c

__all__ = ["DamagedFrame", "FoundRecord", "HeldBytes", "HeldFile", "frame_nbytes"]

_PIECE_NBYTES = 1 << 20
# A segment ends at this size, so that an iteration can be partly in memory.
_MOST_NBYTES = 1 << 30


class _OpenFile:
    """A descriptor that is closed when nobody reads through it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class FoundRecord(NamedTuple):
    """A record of a segment, and its bytes."""

    record: HeldRecord
    data: HeldBytes


class DamagedFrame(NamedTuple):
    """A record that was held and cannot be read any more. None: nothing tells whose it was."""

    identity: HeldIdentity | None


def frame_nbytes(description: bytes, nbytes: int) -> int:
    """Return the bytes that a record takes in a segment."""
    return HEAD_NBYTES + len(description) + nbytes


class HeldFile:
    """A file of held records. One thread appends, others read what it has appended.

    Attributes:
        nbytes: The bytes up to the end of the last frame.
        taken: The offset up to which records have left for the store.
        is_new: Whether this daemon made it. No other takes further records.
        in_memory: Whether it takes memory instead of disk.
    """

    def __init__(self, path: Path, *, in_memory: bool, is_new: bool = True) -> None:
        """Create the file, or take one that an earlier daemon left. Raises OSError."""
        self.path, self.in_memory, self.is_new = path, in_memory, is_new
        self.nbytes = self.taken = 0
        self._last = NOBODY
        flags = os.O_CREAT | os.O_EXCL if is_new else os.O_NOFOLLOW | os.O_NONBLOCK
        self._file: _OpenFile | None = _OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600))
        if not is_new and not stat.S_ISREG(os.fstat(self._file.fd).st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a regular file")

    def append(self, identity: HeldIdentity, description: bytes, pieces: Iterable[bytes]) -> HeldBytes:
        """Append a record. It is there, also after a kill, when this returns. Raises OSError; nothing counts then."""
        file, at = self._opened(), self.nbytes
        first = end = pwrite_all(file.fd, [description], at + HEAD_NBYTES)
        crc = 0
        for piece in pieces:
            crc = google_crc32c.extend(crc, piece)
            end = pwrite_all(file.fd, [piece], end)
        head = FrameHead(len(description), crc32c(description), end - first, crc, identity, self._last)
        pwrite_all(file.fd, [head.encode()], at)
        self.nbytes, self._last = end, identity
        return HeldBytes(self, first, end - first, crc)

    def takes(self, nbytes: int, *, in_memory: bool) -> bool:
        """Return whether a further record belongs here."""
        return self.is_new and self.in_memory == in_memory and self.nbytes + nbytes <= _MOST_NBYTES

    def waiting(self, end: int) -> Iterator[FoundRecord]:
        """Yield the whole records from `taken` to `end`. The caller moves `taken` on. Raises OSError."""
        if self.taken < end:
            yield from (found for found in self._frames(self.taken, end) if isinstance(found, FoundRecord))

    def survey(self) -> Iterator[FoundRecord | DamagedFrame]:
        """Yield what an earlier daemon left, and note its end in `nbytes`. The data is not read.

        A frame that is torn at the end was never acknowledged, and is left out. Damage within the file hides no later
        frame: the next one is searched.
        """
        self.nbytes = 0
        file = self._reading()
        yield from self._frames(0, os.fstat(file.fd).st_size)

    def _frames(self, at: int, size: int) -> Iterator[FoundRecord | DamagedFrame]:
        # Another thread may rest the file, but its descriptor stays open as long as this.
        file, before = self._reading(), NOBODY if at == 0 else None
        fd = file.fd
        while at + HEAD_NBYTES <= size:
            head = FrameHead.decode(os.pread(fd, HEAD_NBYTES, at))
            if head is None:
                found = _next_head(fd, at + 1, size)
                if found is None:
                    break
                at = found
                continue
            if before is not None and head.before != before:
                yield DamagedFrame(None if head.before == NOBODY else head.before)
            before = head.identity
            first, at = at + HEAD_NBYTES + head.description_nbytes, at + head.frame_nbytes
            description = (
                b"" if at > size else os.pread(fd, head.description_nbytes, first - head.description_nbytes)
            )
            record = decode_record(description, head)
            self.nbytes = max(self.nbytes, min(at, size))
            if record is None:
                yield DamagedFrame(head.identity)
            else:
                yield FoundRecord(record, HeldBytes(self, first, head.nbytes, head.crc))
        if at < size and any(os.pread(fd, HEAD_NBYTES, at)):
            # A kill leaves no part of a head.
            yield DamagedFrame(None)

    def read_into(self, view: memoryview, at: int) -> None:
        """Fill `view` from offset `at`. Raises OSError, also if the file is too short."""
        file, done = self._reading(), 0
        while done < len(view):
            count = os.preadv(file.fd, [view[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, f"{self.path} ends {len(view) - done} bytes too early")
            done += count

    def rest(self) -> None:
        """Close the file until a record is appended again."""
        self._file = None

    def remove(self) -> None:
        """Delete the file. Who reads from it finishes this piece, and finds no further one. Raises OSError."""
        unlink(self.path, missing_ok=True)
        # An open file would take its room for as long as records of it wait for the rules.
        self.rest()

    def _opened(self) -> _OpenFile:
        file = self._file = self._reading()
        return file

    def _reading(self) -> _OpenFile:
        """Return the file. One at rest is open only as long as the caller has it, because there are thousands."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return self._file or _OpenFile(os.open(self.path, flags))


class HeldBytes:
    """The raw bytes of a held record, read from its segment when they are needed."""

    def __init__(self, segment: HeldFile, first: int, nbytes: int, crc: int) -> None:
        self._segment, self._first, self.nbytes, self._crc = segment, first, nbytes, crc

    @property
    def end(self) -> int:
        """The offset in the segment after the record."""
        return self._first + self.nbytes

    def read(self, first: int, nbytes: int) -> bytearray:
        """Return a copy of `nbytes` from offset `first` of the record. Raises OSError."""
        data = bytearray(nbytes)
        self._segment.read_into(memoryview(data), self._first + first)
        return data

    def as_array(self, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> ScratchArray:
        """Return the bytes as an array. A slice is read when it is taken."""
        return ScratchArray(self, stored, shape)

    def checked(self, limit_nbytes: int) -> memoryview | HeldBytes:
        """Return the bytes if they are those that were held: in memory up to a size, else to be read from the file.

        Raises:
            OSError: They are damaged, or cannot be read.
        """
        if self.nbytes <= limit_nbytes:
            data = self.read(0, self.nbytes)
            self._check(crc32c(bytes(data)))
            return memoryview(data)
        crc = 0
        for at in range(0, self.nbytes, _PIECE_NBYTES):
            crc = google_crc32c.extend(crc, bytes(self.read(at, min(_PIECE_NBYTES, self.nbytes - at))))
        self._check(crc)
        return self

    def _check(self, crc: int) -> None:
        if crc != self._crc:
            raise OSError(errno.EIO, f"the bytes of a record in {self._segment.path} are damaged")


def _next_head(fd: int, at: int, size: int) -> int | None:
    """Return the offset of the next head from `at` on; None without one."""
    while at + HEAD_NBYTES <= size:
        piece = os.pread(fd, _PIECE_NBYTES, at)
        found = piece.find(MAGIC)
        if found < 0:
            at += max(1, len(piece) - len(MAGIC) + 1)
            continue
        if FrameHead.decode(os.pread(fd, HEAD_NBYTES, at + found)) is not None:
            return at + found
        at += found + 1
    return None
