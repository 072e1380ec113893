"""Reads the journals back: which records a `.partial`, a shard or a small log holds. Changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from capd.store.frames import (
    FRAME_NBYTES,
    Commit,
    FileHeader,
    Frame,
    Kind,
    RecordRow,
    SeriesHeader,
    decode_payload,
    walk,
)
from capd.store.small import SmallRecord, log_number

__all__ = ["LoggedRecord", "ScannedShard", "scan_log", "scan_shard"]


@dataclass(slots=True)
class ScannedShard:
    """A shard file's journal. end: offset behind the last COMMIT. index: slot → (offset, bytes)."""

    header: SeriesHeader
    shard: int
    end: int
    index: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, RecordRow] = field(default_factory=dict)


@dataclass(slots=True)
class LoggedRecord:
    """One record of a small log."""

    header: SeriesHeader
    record: int
    row: RecordRow
    place: SmallRecord


def scan_shard(path: Path) -> ScannedShard | None:
    """The journal of a shard or `.partial` up to the first place that holds no sound frame.

    None if the file does not begin with a sound HEADER (an interrupted creation).
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        found: ScannedShard | None = None
        for frame in walk(fd, 0, size):
            if found is None:
                header = decode_payload(fd, frame) if frame.kind is Kind.HEADER else None
                if not isinstance(header, FileHeader) or header.series is None:
                    return None
                found = ScannedShard(header.series, header.shard, frame.offset + frame.nbytes)
            elif frame.kind is Kind.COMMIT:
                commit = decode_payload(fd, frame)
                if not isinstance(commit, Commit):
                    break
                found.end = frame.offset + frame.nbytes
                found.index.update((slot, (offset, nbytes)) for slot, offset, nbytes in commit.chunks)
                found.rows.update(enumerate(commit.rows, commit.first))
        return found
    finally:
        os.close(fd)


def scan_log(path: Path) -> list[LoggedRecord] | None:
    """All whole records of a small log, in order; None if the file does not begin with a sound HEADER."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        number = log_number(path)
        headers: dict[int, SeriesHeader] = {}
        found: list[LoggedRecord] = []
        record: Frame | None = None
        frames = walk(fd, 0, os.fstat(fd).st_size)
        head = next(frames, None)
        if head is None or head.kind is not Kind.HEADER or decode_payload(fd, head) is None:
            return None
        for frame in frames:
            if frame.kind is Kind.SERIES:
                header = decode_payload(fd, frame)
                if header is None:
                    break
                headers[frame.ordinal] = header
            elif frame.kind is Kind.RECORD:
                record = frame
            elif frame.kind is Kind.COMMIT:
                commit = decode_payload(fd, frame)
                if commit is None or record is None or frame.ordinal not in headers:
                    break
                place = SmallRecord(number, record.offset - FRAME_NBYTES)
                found.append(LoggedRecord(headers[frame.ordinal], commit.first, commit.rows[0], place))
        return found
    finally:
        os.close(fd)
