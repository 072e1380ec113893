"""What the spool of a node holds, for readers: scanned once, and from there on only what was appended.

A writer appends to a file or cuts off what it could not finish, never more. So a file whose bytes before the
known end are still the same has only its rest read; any other is scanned again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from capd.store.frames import (
    FRAME_NBYTES,
    Commit,
    Frame,
    Kind,
    RecordRow,
    SeriesHeader,
    decode_payload,
    walk,
)
from capd.store.scan import LoggedRecord, Run, ScannedShard, read_log, scan_shard
from capd.store.small import LOG_GLOB, LogPlace, log_number, log_place

__all__ = ["Spool", "SpooledSeries"]

_TAIL_NBYTES = 128


@dataclass(slots=True)
class SpooledSeries:
    """What the spool holds of one series. shards: by shard number; logged: by record number.

    places: of logged records by client and sequence, for recovery from damage may have renumbered them.
    """

    header: SeriesHeader
    shards: dict[int, tuple[Path, ScannedShard]] = field(default_factory=dict)
    logged: dict[int, tuple[LogPlace, RecordRow]] = field(default_factory=dict)
    places: dict[tuple[bytes, int], LogPlace] = field(default_factory=dict)

    def drop_moved(self) -> None:
        """Forget logged records that stand in a shard, too: recovery from damage may have renumbered them there."""
        if self.logged and self.shards:
            held = {row.capture for _, scanned in self.shards.values() for row in scanned.rows.values()}
            self.logged = {n: found for n, found in self.logged.items() if found[1].capture not in held}

    def keep(self, visible: Callable[[RecordRow], bool]) -> None:
        """Forget records that are not `visible`."""
        for shard, (path, scanned) in self.shards.items():
            rows = {n: row for n, row in scanned.rows.items() if visible(row)}
            self.shards[shard] = (path, replace(scanned, rows=rows))
        self.logged = {n: (place, row) for n, (place, row) in self.logged.items() if visible(row)}

    def rows(self) -> Iterator[tuple[int, RecordRow]]:
        """Records in the spool; a shard's row goes before a log's."""
        held = {number: row for _, scanned in self.shards.values() for number, row in scanned.rows.items()}
        yield from held.items()
        yield from ((number, row) for number, (_, row) in self.logged.items() if number not in held)

    def row(self, number: int) -> RecordRow | None:
        """The row of one record, if the spool holds it."""
        _, scanned = self.shards.get(number // self.header.geometry.shard_records, (None, None))
        if scanned is not None and number in scanned.rows:
            return scanned.rows[number]
        return self.logged[number][1] if number in self.logged else None


@dataclass(slots=True)
class _Known:
    """How far a file of `size` bytes was read. end: behind the last COMMIT. tail: the bytes before it."""

    inode: tuple[int, int]
    end: int
    size: int
    tail: bytes

    @classmethod
    def of(cls, fd: int, end: int, size: int) -> _Known:
        stat = os.fstat(fd)
        return cls((stat.st_dev, stat.st_ino), end, size, _tail(fd, end))

    def still_holds(self, fd: int) -> bool:
        stat = os.fstat(fd)
        return self.inode == (stat.st_dev, stat.st_ino) and _tail(fd, self.end) == self.tail


@dataclass(slots=True)
class _Partial:
    known: _Known
    scanned: ScannedShard


@dataclass(slots=True)
class _Log:
    known: _Known
    records: list[LoggedRecord]


class Spool:
    """One spool directory. A Spool remembers what it read; each `read` gives a view of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._logs: dict[str, _Log] = {}
        self._shards: dict[str, _Partial] = {}

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by name."""
        sizes: dict[str, int] = {}
        for path in self.directory.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
                sizes[path.name] = path.stat().st_size
        return sizes

    def read(self) -> dict[str, SpooledSeries]:
        """The spool as it is now; files that vanish while it is read were sealed or emptied.

        Logs before shards: a record on its way from one to the other is seen in at least one of them.
        """
        found: dict[str, SpooledSeries] = {}
        self._logs = _all(self.directory.glob(LOG_GLOB), self._logs, _read_log)
        self._shards = _all(self.directory.glob("*.partial"), self._shards, _read_partial)
        for log in self._logs.values():
            for logged in log.records:
                if logged.header is not None:
                    series = found.setdefault(logged.header.path, SpooledSeries(logged.header))
                    series.logged[logged.record] = (logged.place, logged.row)
                    series.places[logged.row.client, logged.row.sequence] = logged.place
        for name, partial in self._shards.items():
            scanned = partial.scanned
            series = found.setdefault(scanned.header.path, SpooledSeries(scanned.header))
            series.shards[scanned.shard] = (self.directory / name, scanned)
        for series in found.values():
            series.drop_moved()
        return found


F = TypeVar("F")


def _all(
    paths: Iterable[Path], before: dict[str, F], read: Callable[[Path, F | None], F | None]
) -> dict[str, F]:
    found: dict[str, F] = {}
    for path in sorted(paths):
        with contextlib.suppress(FileNotFoundError):
            now = read(path, before.get(path.name))
            if now is not None:
                found[path.name] = now
    return found


def _read_partial(path: Path, before: _Partial | None) -> _Partial | None:
    with _opened(path) as fd:
        size = os.fstat(fd).st_size
        if before is not None and before.known.still_holds(fd):
            if size == before.known.size:
                return before
            scanned = _continued(fd, before.scanned, size)
            if scanned.end > before.known.end:
                return _Partial(_Known.of(fd, scanned.end, size), scanned)
        fresh = scan_shard(path)  # new, or unsound behind what is known: the scan searches on
        return None if fresh is None else _Partial(_Known.of(fd, fresh.end, size), fresh)


def _continued(fd: int, known: ScannedShard, size: int) -> ScannedShard:
    index, rows, runs, end = dict(known.index), dict(known.rows), list(known.runs), known.end
    for frame in walk(fd, end, size):
        if frame.kind is Kind.COMMIT:
            commit = decode_payload(fd, frame)
            if commit is None:
                break
            start, end = end, frame.offset + frame.nbytes
            index.update((slot, (offset, nbytes)) for slot, offset, nbytes in commit.chunks)
            rows.update(enumerate(commit.rows, commit.first))
            runs.append(Run(commit, start, end))
    return replace(known, end=end, index=index, rows=rows, runs=runs)


def _read_log(path: Path, before: _Log | None) -> _Log | None:
    with _opened(path) as fd:
        size = os.fstat(fd).st_size
        if before is not None and before.known.still_holds(fd):
            if size == before.known.size:
                return before
            records, end = _continued_log(fd, log_number(path), before, size)
            if end > before.known.end:
                return _Log(_Known.of(fd, end, size), records)
        fresh = read_log(path)
        return None if fresh is None else _Log(_Known.of(fd, fresh.end, size), fresh.records)


def _continued_log(fd: int, number: int, before: _Log, size: int) -> tuple[list[LoggedRecord], int]:
    records, end = list(before.records), before.known.end
    headers = {logged.reference: logged.header for logged in records}
    record: Frame | None = None
    for frame in walk(fd, end, size):
        if frame.kind is Kind.RECORD:
            record = frame
            continue
        payload = decode_payload(fd, frame)
        if isinstance(payload, SeriesHeader):
            headers[frame.ordinal] = payload
        elif isinstance(payload, Commit) and record is not None and headers.get(frame.ordinal) is not None:
            place = log_place(number, record.offset - FRAME_NBYTES)
            header, row = headers[frame.ordinal], payload.rows[0]
            records.append(LoggedRecord(header, payload.first, row, place, frame.ordinal))
            end = frame.offset + frame.nbytes
        else:
            break
    return records, end


def _tail(fd: int, end: int) -> bytes:
    count = min(_TAIL_NBYTES, end)
    return os.pread(fd, count, end - count)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
