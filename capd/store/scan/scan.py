"""Reads the journals back: the records of a `.partial`, a shard or a small log. Changes nothing.

Damage costs only the damaged parts. If there is no intact frame at an offset, the walk searches for the next one and
continues from it. A record counts if its COMMIT is intact, agrees with the series' geometry, and refers to earlier
chunks. The bytes of these chunks are checked when they are read.

Bytes after the last COMMIT remain from an interrupted write, or are the index of a sealed shard. A HEADER inside a file
begins a foreign journal that was appended later. Nothing from there on counts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from capd.store.documents.headers import is_usable
from capd.store.format.dtypes import stored_shape
from capd.store.format.frames import (
    FRAME_NBYTES,
    Commit,
    FileHeader,
    Frame,
    FrameKind,
    RecordRow,
    SeriesHeader,
    decode_payload,
    payload_is_sound,
    read_frame,
)
from capd.store.format.geometry import Geometry
from capd.store.format.log_places import LogPlace, log_number, log_place
from capd.store.scan.walk import pieces

__all__ = [
    "CommitRun",
    "LoggedRecord",
    "ScannedLog",
    "ScannedShard",
    "read_log",
    "read_open_log",
    "read_shard",
    "scan_shard",
]  # fmt: skip


class CommitRun(NamedTuple):
    """One intact COMMIT, and the bytes [start, end) of its chunks and frames."""

    commit: Commit
    start: int
    end: int

    @property
    def share(self) -> int:
        """The stored bytes of each of its records."""
        return (self.end - self.start) // len(self.commit.rows)


@dataclass(slots=True)
class ScannedShard:
    """The journal of a shard file.

    Attributes:
        header: The series of the shard.
        shard: The number of the shard.
        end: The offset after the last COMMIT.
        file: The HEADER; None if it is lost and the caller knew the series.
        index: Slot → (offset, bytes).
        rows: Record number → row.
        runs: The commits, in order.
        gaps: The byte ranges without an intact frame.
    """

    header: SeriesHeader
    shard: int
    end: int
    file: FileHeader | None = None
    index: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, RecordRow] = field(default_factory=dict)
    runs: list[CommitRun] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def covering(self, count: int) -> dict[int, tuple[int, int]]:
        """Return the index without the chunks that are older than some of their small records.

        If the newest COMMIT of a shared chunk is lost, the previous COMMIT refers to an older copy. That copy lacks
        records.

        Args:
            count: The number of the first record that need not be covered.
        """
        geometry = self.header.geometry
        index = dict(self.index)
        reached = {
            slot: run.commit.first + len(run.commit.rows)
            for run in self.runs
            for slot, _, _ in run.commit.chunks
        }
        begin = self.shard * geometry.shard_records
        for first in range(begin, min(count, begin + geometry.shard_records), geometry.batch):
            slot = geometry.slot(first, 0)
            if geometry.is_small and reached.get(slot, 0) < min(first + geometry.batch, count):
                index.pop(slot, None)
        return index

    @property
    def replaced_nbytes(self) -> int:
        """The bytes of chunks that later COMMITs replaced."""
        live = {offset for offset, _ in self.index.values()}
        chunks = {offset: nbytes for run in self.runs for _, offset, nbytes in run.commit.chunks}
        return sum(nbytes for offset, nbytes in chunks.items() if offset not in live)

    def copy(self) -> ScannedShard:
        """Return a journal that another scan may continue after the last COMMIT."""
        gaps = [gap for gap in self.gaps if gap[0] < self.end]
        return replace(self, index=dict(self.index), rows=dict(self.rows), runs=list(self.runs), gaps=gaps)

    @property
    def newest(self) -> int:
        """The highest record number; -1 if there is no record."""
        return self.runs[-1].commit.first + len(self.runs[-1].commit.rows) - 1 if self.runs else -1


@dataclass(slots=True)
class LoggedRecord:
    """One record of a small log.

    Attributes:
        header: The series; None if its SERIES frame is lost.
        record: The record's number in the series.
        row: The record's row.
        place: The place of the record in the log.
        reference: The series reference of its frames.
        is_sound: Whether the bytes match their checksum, if the caller asked for the check.
    """

    header: SeriesHeader | None
    record: int
    row: RecordRow
    place: LogPlace
    reference: int
    is_sound: bool = True


@dataclass(slots=True)
class ScannedLog:
    """The journal of a small log.

    Attributes:
        file: The HEADER; None if it is lost.
        records: The records, in order.
        gaps: The byte ranges without an intact frame.
        end: The offset after the last COMMIT.
        headers: The log's series, by reference.
    """

    file: FileHeader | None
    records: list[LoggedRecord] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0
    headers: dict[int, SeriesHeader] = field(default_factory=dict)

    def copy(self) -> ScannedLog:
        """Return a journal that another scan may continue after the last COMMIT."""
        gaps = [gap for gap in self.gaps if gap[0] < self.end]
        return replace(self, records=list(self.records), gaps=gaps, headers=dict(self.headers))


def scan_shard(path: Path, known: tuple[SeriesHeader, int] | None = None) -> ScannedShard | None:
    """Return the journal of a shard or `.partial`, as `read_shard` does.

    Raises:
        OSError: The file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_shard(fd, known)
    finally:
        os.close(fd)


def read_shard(
    fd: int,
    known: tuple[SeriesHeader, int] | None = None,
    visit: Callable[[int, Frame], None] | None = None,
    before: ScannedShard | None = None,
) -> ScannedShard | None:
    """Return the journal of an open file; None if it is not a regular file or its series is unknown.

    Args:
        fd: The file.
        known: Series and shard number, for a file whose HEADER is lost.
        visit: Called with the descriptor and every CHUNK frame.
        before: The journal of the file when it was shorter. Only bytes after its last COMMIT are read.

    Raises:
        OSError: The file cannot be read.
    """
    size = _regular_nbytes(fd)
    if before is not None:
        found, begin = before.copy(), before.end
    else:
        begin, file = _read_header(fd, size)
        if file is not None and file.series is not None and is_usable(file.series):
            found = ScannedShard(file.series, file.shard, begin, file)
        elif known is not None and size:
            found = ScannedShard(*known, end=0, gaps=[(0, begin)] if begin else [])
        else:
            return None
    _read_commits(fd, begin, size, found, visit)
    return found


def _read_commits(
    fd: int, begin: int, size: int, found: ScannedShard, visit: Callable[[int, Frame], None] | None
) -> None:
    # Offset → bytes. A COMMIT may refer to a chunk of the previous record.
    chunks = dict(found.index.values())
    start = begin
    for piece in pieces(fd, begin, size):
        if not isinstance(piece, Frame):
            found.gaps.append(piece)
            start = piece[1]
        elif piece.kind is FrameKind.CHUNK:
            chunks[piece.offset] = piece.nbytes
            if visit is not None:
                visit(fd, piece)
        else:
            end = piece.offset + piece.nbytes
            commit = decode_payload(fd, piece) if piece.kind is FrameKind.COMMIT else None
            if isinstance(commit, Commit) and _fits(commit, piece.offset - FRAME_NBYTES, found, chunks):
                found.runs.append(CommitRun(commit, start, end))
                found.end = end
                found.index.update((slot, (offset, nbytes)) for slot, offset, nbytes in commit.chunks)
                found.rows.update(enumerate(commit.rows, commit.first))
            else:
                found.gaps.append((piece.offset - FRAME_NBYTES, end))
            start = end


def _fits(commit: Commit, at: int, found: ScannedShard, chunks: dict[int, int]) -> bool:
    """Return whether a COMMIT at offset `at` can be the next one of this shard."""
    geometry, dtype, rows = found.header.geometry, found.header.dtype, commit.rows
    last = commit.first + len(rows) - 1
    if not rows or commit.first <= found.newest or commit.first < 0:
        return False
    if not commit.first // geometry.shard_records == last // geometry.shard_records == found.shard:
        return False
    if commit.first // geometry.batch != last // geometry.batch:
        return False
    if not all(
        geometry.fits(stored_shape(dtype, row.shape)) and min(row.shape, default=0) >= 0 for row in rows
    ):
        return False
    return _slots(geometry, commit) == {slot for slot, _, _ in commit.chunks} and all(
        offset >= 0
        and 4 <= nbytes <= at - offset
        and (chunks.get(offset) == nbytes or _in_a_gap(found.gaps, offset, offset + nbytes))
        for _, offset, nbytes in commit.chunks
    )


def _slots(geometry: Geometry, commit: Commit) -> set[int]:
    if geometry.is_small:
        return {geometry.slot(commit.first, 0)}
    return {geometry.slot(commit.first, ordinal) for ordinal, _ in geometry.chunks(commit.rows[0].shape)}


def _in_a_gap(gaps: list[tuple[int, int]], start: int, end: int) -> bool:
    return any(first <= start and end <= last for first, last in gaps)


def read_log(path: Path, *, check: bool = False) -> ScannedLog | None:
    """Return the journal of a small log, as `read_open_log` does.

    Raises:
        OSError: The file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_open_log(fd, path, check=check)
    finally:
        os.close(fd)


def read_open_log(
    fd: int, path: Path, *, check: bool = False, before: ScannedLog | None = None
) -> ScannedLog | None:
    """Return the journal of an open small log; None if it is not a log file or contains nothing intact.

    Args:
        fd: The file.
        path: Its path. A regular file with the name of a log is accepted.
        check: Whether to read the bytes of every record and compare them with their checksum.
        before: The journal of the file when it was shorter. Only bytes after its last COMMIT are read.

    Raises:
        OSError: The file cannot be read.
    """
    if not path.stem.removeprefix("small-").isdecimal():
        return None
    size = _regular_nbytes(fd)
    if before is not None:
        found = before.copy()
    else:
        begin, file = _read_header(fd, size)
        found = ScannedLog(file, gaps=[] if file is not None or not begin else [(0, begin)], end=begin)
    _read_records(fd, found.end, size, log_number(path), found, check=check)
    return found if found.file is not None or found.records else None


def _read_records(fd: int, begin: int, size: int, number: int, found: ScannedLog, *, check: bool) -> None:
    record: Frame | None = None
    for piece in pieces(fd, begin, size):
        if not isinstance(piece, Frame):
            found.gaps.append(piece)
            continue
        at = piece.offset - FRAME_NBYTES
        if piece.kind is FrameKind.RECORD:
            record = piece
            continue
        payload = decode_payload(fd, piece) if piece.kind is not FrameKind.CHUNK else None
        if isinstance(payload, SeriesHeader) and is_usable(payload):
            found.headers[piece.ordinal] = payload
        elif (
            isinstance(payload, Commit)
            and len(payload.rows) == 1
            and record is not None
            and (record.offset + record.nbytes, *record[2:5]) == (at, *piece[2:5])
        ):
            found.records.append(
                LoggedRecord(
                    found.headers.get(piece.ordinal),
                    payload.first,
                    payload.rows[0],
                    log_place(number, record.offset - FRAME_NBYTES),
                    piece.ordinal,
                    not check or payload_is_sound(record, os.pread(fd, record.nbytes, record.offset)),
                )
            )
            found.end = piece.offset + piece.nbytes
        else:
            found.gaps.append((at, piece.offset + piece.nbytes))


def _read_header(fd: int, size: int) -> tuple[int, FileHeader | None]:
    """Return the offset after the HEADER, and its payload.

    The offset is 0 if the file does not begin with a HEADER. The payload is None if it is damaged.
    """
    head = read_frame(fd, 0, size)
    if head is None or head.kind is not FrameKind.HEADER:
        return 0, None
    file = decode_payload(fd, head)
    return head.offset + head.nbytes, file if isinstance(file, FileHeader) else None


def _regular_nbytes(fd: int) -> int:
    """Return the size of a regular file; 0 for anything else."""
    info = os.fstat(fd)
    return info.st_size if stat.S_ISREG(info.st_mode) else 0
