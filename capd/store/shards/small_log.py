"""The node's log of small records: they are appended raw with their COMMIT and kept until a shard holds them.

Each run has one log per node, in files of limited size. A file is deleted once every record in it is in a shard file's
COMMIT. Recovery reads the remaining files.
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

# One read covers a record of a few KiB and its COMMIT.
_READ_NBYTES = 8 << 10
_COMMIT_NBYTES = 1 << 10
_encode = msgspec.msgpack.Encoder().encode


class Small(msgspec.Struct, gc=False):
    """A small record in memory.

    Attributes:
        session: The session of its frames.
        sequence: The client's sequence number.
        shape: The shape of the tensor.
        row: The encoded RecordRow.
        data: The elements, C order.
    """

    session: int
    sequence: int
    shape: tuple[int, ...]
    row: bytes
    data: bytes

    @classmethod
    def of(cls, row: RecordRow, data: bytes) -> Small:
        """Return the record that `row` describes."""
        return cls(session_of(row.client), row.sequence, row.shape, encode_row(row), data)


class SmallLog:
    """The small-record log of one run on one node; owned by the append thread."""

    def __init__(self, directory: Path, header: FileHeader, file_nbytes: int, files: OpenFiles) -> None:
        self._directory, self._header, self._file_nbytes, self._files = directory, header, file_nbytes, files
        self._number = max((log_number(path) for path in directory.glob(LOG_GLOB)), default=-1)
        # Whether log `_number` accepts more records.
        self._open = False
        self._end = 0
        self._references: dict[str, int] = {}
        # Log number → number of records that are not in a shard yet.
        self._waiting: dict[int, int] = {}

    def path(self, number: int) -> Path:
        """Return the file of log `number`."""
        return log_path(self._directory, number)

    @property
    def oldest(self) -> int | None:
        """The number of the oldest file with pending records; None unless more than eight files have some."""
        return min(self._waiting) if len(self._waiting) > 8 else None

    def append(self, records: Sequence[tuple[SeriesHeader, int, Small]]) -> list[LogPlace]:
        """Append records, each with its COMMIT, in one write.

        Args:
            records: The series, the record number and the record.

        Returns:
            The places of the records in the log.

        Raises:
            OSError: The write failed. None of the records remains.
        """
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
        """Count pending records of log `number`. Recovery calls this for the records that it finds."""
        self._waiting[number] = self._waiting.get(number, 0) + count

    def release(self, number: int, count: int) -> None:
        """Note that `count` records of log `number` are in a shard now.

        A finished file without pending records is deleted.
        """
        self._waiting[number] -= count
        if self._waiting[number] == 0 and not (self._open and number == self._number):
            self._delete(number)

    def rotate(self) -> None:
        """Finish the current file. It is deleted as soon as it has no pending records."""
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
        except OSError as error:
            # All of its records are in shards, so the next start removes it.
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
    """Return raw bytes, COMMIT and RECORD frame of the record at `offset`.

    Raises:
        DamagedRecord: The record or its COMMIT is damaged.
    """
    held = os.pread(fd, _READ_NBYTES, offset)
    record = parse_frame(held, 0, offset)
    if record is None or record.kind is not FrameKind.RECORD or record.nbytes > SMALL_NBYTES:
        raise DamagedRecord(f"no record frame at byte {offset} of the small log")
    commit_at = FRAME_NBYTES + record.nbytes
    if len(held) < commit_at + _COMMIT_NBYTES:
        held = os.pread(fd, commit_at + _COMMIT_NBYTES, offset)
    raw = held[FRAME_NBYTES:commit_at]
    commit_frame = parse_frame(held, commit_at)
    if commit_frame is None or commit_frame.kind is not FrameKind.COMMIT or not payload_is_sound(record, raw):
        raise DamagedRecord(f"the record at byte {offset} of the small log fails its checksum")
    at = commit_at + FRAME_NBYTES
    payload = held[at : at + commit_frame.nbytes]
    if len(payload) < commit_frame.nbytes:
        payload = os.pread(fd, commit_frame.nbytes, offset + at)
    commit = decode_commit(commit_frame, payload)
    if commit is None:
        raise DamagedRecord(f"the commit after byte {offset} of the small log fails its checksum")
    return raw, commit, record
