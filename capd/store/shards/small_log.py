"""The node's log of small records: appended raw with their COMMIT, kept until a shard holds them.

One log per run and node, in files of limited size. A file is deleted once every record in it stands in a
shard file's COMMIT; recovery reads whatever is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from capd.errors import DamagedRecord
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import new_file, pwrite_all, truncate, unlink
from capd.store.disk.open_files import OpenFiles
from capd.store.format.frames import (
    FRAME_NBYTES,
    Commit,
    FileHeader,
    Frame,
    FrameKind,
    RecordRow,
    SeriesHeader,
    decode_commit,
    encode_commit,
    encode_row,
    frame,
    parse_frame,
    payload_is_sound,
    session_of,
)
from capd.store.format.geometry import SMALL_NBYTES
from capd.store.format.log_places import LOG_GLOB, LogPlace, log_number, log_path, log_place

__all__ = ["Small", "SmallLog", "read_small"]

logger = logging.getLogger(__name__)

_READ_NBYTES = 8 << 10  # a record of a few KiB with its COMMIT in one read
_COMMIT_NBYTES = 1 << 10
_encode = msgspec.msgpack.Encoder().encode


class Small(msgspec.Struct, gc=False):
    """A small record in memory. session: of its frames. row: its RecordRow, encoded. data: its elements, C order."""

    session: int
    sequence: int
    shape: tuple[int, ...]
    row: bytes
    data: bytes

    @classmethod
    def of(cls, row: RecordRow, data: bytes) -> Small:
        """The record that `row` describes."""
        return cls(session_of(row.client), row.sequence, row.shape, encode_row(row), data)


class SmallLog:
    """Appends small records; owned by the append thread."""

    def __init__(self, directory: Path, header: FileHeader, file_nbytes: int, files: OpenFiles) -> None:
        self._directory, self._header, self._file_nbytes, self._files = directory, header, file_nbytes, files
        self._number = max((log_number(path) for path in directory.glob(LOG_GLOB)), default=-1)
        self._open = False  # whether log `_number` takes more records
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

    def append(self, records: Sequence[tuple[SeriesHeader, int, Small]]) -> list[LogPlace]:
        """Append records (with their series and number), each with its COMMIT, in one write. Raises OSError; then
        nothing of them remains."""
        path = self._file()
        parts: list[bytes] = []
        places: list[LogPlace] = []
        fresh: dict[str, int] = {}
        at = self._end
        for series, number, small in records:
            reference = self._references.get(series.path, fresh.get(series.path))
            if reference is None:
                reference = fresh[series.path] = len(self._references) + len(fresh)
                payload = _encode(series)
                parts += [frame(FrameKind.SERIES, payload, reference), payload]
                at += FRAME_NBYTES + len(payload)
            session, sequence, data, nbytes = small.session, small.sequence, small.data, len(small.data)
            commit = encode_commit(number, [small.row])
            head = frame(FrameKind.RECORD, data, reference, session, sequence, nbytes)
            parts += [head, data, frame(FrameKind.COMMIT, commit, reference, session, sequence), commit]
            places.append(log_place(self._number, at))
            at += 2 * FRAME_NBYTES + nbytes + len(commit)
        fd = self._files.get(path)
        try:
            failpoint("log.before_write")
            end = pwrite_all(fd, [b"".join(parts)], self._end)
            failpoint("log.after_write")
        except OSError:
            with contextlib.suppress(OSError):
                truncate(fd, self._end)
            raise
        self._files.wrote(path, self._end, end)
        self._end = end
        self._references |= fresh
        self.adopt(self._number, len(records))
        return places

    def adopt(self, number: int, count: int = 1) -> None:
        """Count records that wait in log `number` (recovery does this for those it finds)."""
        self._waiting[number] = self._waiting.get(number, 0) + count

    def release(self, number: int, count: int) -> None:
        """So many records of log `number` stand in a shard now; an emptied, finished file is deleted."""
        self._waiting[number] -= count
        if self._waiting[number] == 0 and not (self._open and number == self._number):
            self._delete(number)

    def rotate(self) -> None:
        """Finish the current file; it is deleted as soon as nothing waits in it."""
        if self._open:
            self._open = False
            if not self._waiting.get(self._number):
                self._delete(self._number)

    def _delete(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._files.forget(self.path(number))
        try:
            failpoint("log.before_delete")
            unlink(self.path(number), missing_ok=True)
        except OSError as error:  # its records stand in shards: the next start removes it
            logger.warning("cannot remove %s: %s", self.path(number), error)

    def _file(self) -> Path:
        if self._open and self._end >= self._file_nbytes:
            self.rotate()
        if not self._open:
            payload = _encode(self._header)
            path = self.path(self._number + 1)
            failpoint("create.before_header")
            end = new_file(path, [frame(FrameKind.HEADER, payload), payload])
            self._files.created(path, end)
            self._open, self._number, self._end, self._references = True, self._number + 1, end, {}
            failpoint("create.after_header")
        return self.path(self._number)


def read_small(fd: int, offset: int) -> tuple[bytes, Commit, Frame]:
    """Raw bytes, COMMIT and RECORD frame of the record at `offset`; raises DamagedRecord if either is damaged."""
    held = os.pread(fd, _READ_NBYTES, offset)
    record = parse_frame(held, 0, offset)
    if record is None or record.kind is not FrameKind.RECORD or record.nbytes > SMALL_NBYTES:
        raise DamagedRecord(f"no record frame at byte {offset} of the small log")
    behind = FRAME_NBYTES + record.nbytes
    if len(held) < behind + _COMMIT_NBYTES:
        held = os.pread(fd, behind + _COMMIT_NBYTES, offset)
    raw = held[FRAME_NBYTES:behind]
    follower = parse_frame(held, behind)
    if follower is None or follower.kind is not FrameKind.COMMIT or not payload_is_sound(record, raw):
        raise DamagedRecord(f"the record at byte {offset} of the small log fails its checksum")
    at = behind + FRAME_NBYTES
    payload = held[at : at + follower.nbytes]
    if len(payload) < follower.nbytes:
        payload = os.pread(fd, follower.nbytes, offset + at)
    commit = decode_commit(follower, payload)
    if commit is None:
        raise DamagedRecord(f"the commit behind byte {offset} of the small log fails its checksum")
    return raw, commit, record
