"""Reads the journals back: which records a `.partial`, a shard or a small log holds. Changes nothing.

Damage costs what it touched. Where no sound frame stands, the walk searches for the next one and goes on; a
record counts if its COMMIT is sound, agrees with the series' geometry, and points at chunks in front of it.
Whether those chunks' bytes are sound is found out when they are read. What stands behind the last COMMIT is
the leftover of an interrupted write, or the index of a sealed shard. A HEADER inside a file begins another
journal that somebody appended: nothing from there on counts.
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
    "read_further_log",
    "read_further_shard",
    "read_log",
    "read_shard",
    "scan_shard",
]  # fmt: skip


class CommitRun(NamedTuple):
    """One sound COMMIT and the bytes [start, end) of the chunks and frames that belong to it."""

    commit: Commit
    start: int
    end: int

    @property
    def share(self) -> int:
        """Stored bytes of each of its records."""
        return (self.end - self.start) // len(self.commit.rows)


@dataclass(slots=True)
class ScannedShard:
    """A shard file's journal. file: its HEADER, None where that is lost and the caller knew the series.

    end: offset behind the last COMMIT. index: slot → (offset, bytes). gaps: byte ranges without a sound frame.
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
        """The index without chunks that lack some of the small records below number `count` which share them.

        Where the newest COMMIT of such a chunk is lost, the one before names an older copy.
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
    def newest(self) -> int:
        """The highest record number, -1 for none."""
        return self.runs[-1].commit.first + len(self.runs[-1].commit.rows) - 1 if self.runs else -1


@dataclass(slots=True)
class LoggedRecord:
    """One record of a small log. header: None where its SERIES frame is lost. is_sound: its bytes match."""

    header: SeriesHeader | None
    record: int
    row: RecordRow
    place: LogPlace
    reference: int
    is_sound: bool = True


@dataclass(slots=True)
class ScannedLog:
    """A small log's journal. file: its HEADER, None where that is lost. end: offset behind the last COMMIT.

    headers: of its series, by reference.
    """

    file: FileHeader | None
    records: list[LoggedRecord] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0
    headers: dict[int, SeriesHeader] = field(default_factory=dict)


def scan_shard(
    path: Path,
    known: tuple[SeriesHeader, int] | None = None,
    visit: Callable[[int, Frame], None] | None = None,
) -> ScannedShard | None:
    """The journal of a shard or `.partial`; None if that is no regular file, or nobody knows its series.

    known: series and shard number, for a file whose HEADER is lost. visit: called with the descriptor and every
    CHUNK frame. Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_shard(fd, known, visit)
    finally:
        os.close(fd)


def read_shard(
    fd: int,
    known: tuple[SeriesHeader, int] | None = None,
    visit: Callable[[int, Frame], None] | None = None,
) -> ScannedShard | None:
    """`scan_shard` of an open file."""
    size = _regular_nbytes(fd) or 0
    begin, file = _read_header(fd, size)
    if file is not None and file.series is not None and is_usable(file.series):
        found = ScannedShard(file.series, file.shard, begin, file)
    elif known is not None and size:
        found = ScannedShard(*known, end=0, gaps=[(0, begin)] if begin else [])
    else:
        return None
    _read_commits(fd, begin, size, found, visit)
    return found


def read_further_shard(fd: int, known: ScannedShard) -> ScannedShard:
    """The journal of a file that grew since it was scanned; reads on from the last known COMMIT. Raises OSError."""
    found = replace(
        known,
        index=dict(known.index),
        rows=dict(known.rows),
        runs=list(known.runs),
        gaps=[gap for gap in known.gaps if gap[0] < known.end],
    )
    _read_commits(fd, known.end, _regular_nbytes(fd) or 0, found, None)
    return found


def _read_commits(
    fd: int, begin: int, size: int, found: ScannedShard, visit: Callable[[int, Frame], None] | None
) -> None:
    chunks = dict(found.index.values())  # offset → bytes; a COMMIT may name one of the record before
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
    """Whether a COMMIT at offset `at` can be the next one of this shard."""
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
    """The journal of a small log; None if it is no regular file of a log's name, or holds nothing sound.

    check: read every record's bytes and compare them with their checksum. Raises OSError.
    """
    if not path.stem.removeprefix("small-").isdecimal():
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = _regular_nbytes(fd) or 0
        begin, file = _read_header(fd, size)
        found = ScannedLog(file, gaps=[] if file is not None or not begin else [(0, begin)], end=begin)
        _read_records(fd, begin, size, log_number(path), found, check=check)
        return found if found.file is not None or found.records else None
    finally:
        os.close(fd)


def read_further_log(fd: int, number: int, known: ScannedLog) -> ScannedLog:
    """The journal of log `number`, which grew since it was read, from the last known COMMIT on. Raises OSError."""
    found = replace(
        known,
        records=list(known.records),
        gaps=[gap for gap in known.gaps if gap[0] < known.end],
        headers=dict(known.headers),
    )
    _read_records(fd, known.end, _regular_nbytes(fd) or 0, number, found, check=False)
    return found


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
    """The offset behind the HEADER (0 where no frame begins the file), and its payload, None if that is damaged."""
    head = read_frame(fd, 0, size)
    if head is None or head.kind is not FrameKind.HEADER:
        return 0, None
    file = decode_payload(fd, head)
    return head.offset + head.nbytes, file if isinstance(file, FileHeader) else None


def _regular_nbytes(fd: int) -> int | None:
    info = os.fstat(fd)
    return info.st_size if stat.S_ISREG(info.st_mode) else None
