"""The node's log of small records: appended raw with their COMMIT, kept until a shard holds them.

One log per run and node, in files of limited size. A file is deleted once every record in it stands in a
shard file's COMMIT; recovery reads whatever is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from capd.errors import DamagedRecord
from capd.store.files import new_file, pwrite_all
from capd.store.frames import (
    Commit,
    FileHeader,
    Frame,
    Kind,
    RecordRow,
    SeriesHeader,
    decode_payload,
    frame,
    payload_is_sound,
    read_frame,
)
from capd.store.shards import DescriptorCache

__all__ = ["LOG_GLOB", "SmallLog", "SmallRecord", "log_number", "log_path", "read_small"]

LOG_GLOB = "small-*.log"
logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class SmallRecord(NamedTuple):
    """Where a small record waits: log file number and offset of its RECORD frame."""

    log: int
    offset: int


def log_number(path: Path) -> int:
    """The number in a log file's name."""
    return int(path.stem.removeprefix("small-"))


def log_path(directory: Path, number: int) -> Path:
    """The file of log `number`."""
    return directory / f"small-{number:08d}.log"


class SmallLog:
    """Appends small records; owned by the append thread."""

    def __init__(self, directory: Path, header: FileHeader, file_nbytes: int, files: DescriptorCache) -> None:
        self._directory, self._header, self._file_nbytes, self._files = directory, header, file_nbytes, files
        self._fd: int | None = None
        self._number = max((log_number(path) for path in directory.glob(LOG_GLOB)), default=-1)
        self._end = 0
        self._references: dict[str, int] = {}
        self._waiting: dict[int, int] = {}  # log number → records not yet in a shard

    def path(self, number: int) -> Path:
        """The file of log `number`."""
        return log_path(self._directory, number)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest file that still holds records, if more than eight are held back."""
        return min(self._waiting) if len(self._waiting) > 8 else None

    def append(
        self, series: SeriesHeader, data: memoryview | bytes, record: int, row: RecordRow
    ) -> SmallRecord:
        """Append one record and its COMMIT in one write; raises OSError and leaves nothing of it on failure."""
        fd = self._file()
        reference = self._references.get(series.path)
        parts: list[bytes | memoryview] = []
        if reference is None:
            reference = len(self._references)
            payload = _encode(series)
            parts += [frame(Kind.SERIES, payload, ordinal=reference), payload]
        offset = self._end + sum(map(len, parts))
        raw = bytes(data)
        commit = _encode(Commit(record, [row]))
        session = int.from_bytes(row.client[:8], "little")
        marks = {"ordinal": reference, "session": session, "sequence": row.sequence}
        parts += [
            frame(Kind.RECORD, raw, raw_nbytes=len(raw), **marks),
            raw,
            frame(Kind.COMMIT, commit, **marks),
            commit,
        ]
        try:
            end = pwrite_all(fd, parts, self._end)
            if self._files.sync:
                os.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._end)
            raise
        self._end = end
        self._references[series.path] = reference
        self.adopt(self._number)
        return SmallRecord(self._number, offset)

    def adopt(self, number: int) -> None:
        """Count one waiting record in log `number` (recovery does this for records it finds)."""
        self._waiting[number] = self._waiting.get(number, 0) + 1

    def release(self, number: int) -> None:
        """One record of log `number` stands in a shard now; an emptied, finished file is deleted."""
        self._waiting[number] -= 1
        if self._waiting[number] == 0 and (number != self._number or self._fd is None):
            self._delete(number)

    def rotate(self) -> None:
        """Finish the current file; it is deleted as soon as nothing waits in it."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        if not self._waiting.get(self._number):
            self._delete(self._number)

    def _delete(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._files.forget(self.path(number))
        try:
            self.path(number).unlink(missing_ok=True)
        except OSError as error:  # its records stand in shards: the next start removes it
            logger.warning("cannot remove %s: %s", self.path(number), error)

    def _file(self) -> int:
        if self._fd is not None and self._end >= self._file_nbytes:
            self.rotate()
        if self._fd is None:
            payload = _encode(self._header)
            path = self.path(self._number + 1)
            end = new_file(path, [frame(Kind.HEADER, payload), payload], sync=self._files.sync)
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._number, self._end, self._references = self._number + 1, end, {}
        return self._fd


def read_small(fd: int, offset: int) -> tuple[bytes, Commit, Frame]:
    """Raw bytes, COMMIT and RECORD frame of the record at `offset`; raises DamagedRecord if either is damaged."""
    end = os.fstat(fd).st_size
    record = read_frame(fd, offset, end)
    if record is None or record.kind is not Kind.RECORD:
        raise DamagedRecord(f"no record frame at byte {offset} of the small log")
    raw = os.pread(fd, record.nbytes, record.offset)
    follower = read_frame(fd, record.offset + record.nbytes, end)
    if follower is None or follower.kind is not Kind.COMMIT or not payload_is_sound(record, raw):
        raise DamagedRecord(f"the record at byte {offset} of the small log fails its checksum")
    commit = decode_payload(fd, follower)
    if commit is None:
        raise DamagedRecord(f"the commit behind byte {offset} of the small log fails its checksum")
    return raw, commit, record
