"""The spool of a node for readers: scanned once, and then only where it grew.

A writer only appends to a file or cuts off its unfinished end. If the bytes before the known end are the same, only
the rest of the file is read. Any other file is scanned again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from capd.store.disk.files import opened
from capd.store.disk.layout import PARTIAL_GLOB
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.log_places import LOG_GLOB, LogPlace
from capd.store.scan.scan import ScannedLog, ScannedShard, read_open_log, read_shard

__all__ = ["Spool", "SpooledSeries"]

_TAIL_NBYTES = 128


@dataclass(slots=True)
class SpooledSeries:
    """The records of one series in the spool. shards: by shard number. logged: by record number.

    places: the places of logged records by client and sequence, because recovery from damage may renumber records.
    """

    header: SeriesHeader
    shards: dict[int, tuple[Path, ScannedShard]] = field(default_factory=dict)
    logged: dict[int, tuple[LogPlace, RecordRow]] = field(default_factory=dict)
    places: dict[tuple[bytes, int], LogPlace] = field(default_factory=dict)

    def drop_moved(self) -> None:
        """Drop logged records that are in a shard, too. Recovery from damage may have renumbered them there."""
        if self.logged and self.shards:
            held = {row.capture for _, scanned in self.shards.values() for row in scanned.rows.values()}
            self.logged = {n: found for n, found in self.logged.items() if found[1].capture not in held}

    def keep(self, visible: Callable[[RecordRow], bool]) -> None:
        """Drop records that are not `visible`."""
        for shard, (path, scanned) in self.shards.items():
            rows = {n: row for n, row in scanned.rows.items() if visible(row)}
            self.shards[shard] = (path, replace(scanned, rows=rows))
        self.logged = {n: (place, row) for n, (place, row) in self.logged.items() if visible(row)}

    def rows(self) -> Iterator[tuple[int, RecordRow]]:
        """Yield the records in the spool. If shard and log hold one number, the shard's row is used."""
        held = {number: row for _, scanned in self.shards.values() for number, row in scanned.rows.items()}
        yield from held.items()
        yield from ((number, row) for number, (_, row) in self.logged.items() if number not in held)

    def row(self, number: int) -> RecordRow | None:
        """Return the row of one record; None if the spool does not hold it."""
        _, scanned = self.shards.get(number // self.header.geometry.shard_records, (None, None))
        if scanned is not None and number in scanned.rows:
            return scanned.rows[number]
        return self.logged[number][1] if number in self.logged else None


S = TypeVar("S", ScannedShard, ScannedLog)


@dataclass(slots=True)
class _Read(Generic[S]):
    """The scanned content of a file of `size` bytes. tail: its bytes before the end of the last COMMIT."""

    inode: tuple[int, int]
    size: int
    tail: bytes
    scanned: S

    @classmethod
    def of(cls, fd: int, size: int, scanned: S) -> _Read[S]:
        stat = os.fstat(fd)
        return cls((stat.st_dev, stat.st_ino), size, _tail(fd, scanned.end), scanned)

    def still_holds(self, fd: int) -> bool:
        stat = os.fstat(fd)
        return self.inode == (stat.st_dev, stat.st_ino) and _tail(fd, self.scanned.end) == self.tail


class Spool:
    """One spool directory. A Spool keeps the scanned files. Each `read` returns a new view."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._logs: dict[str, _Read[ScannedLog]] = {}
        self._shards: dict[str, _Read[ScannedShard]] = {}

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, by name."""
        sizes: dict[str, int] = {}
        for path in self.directory.glob("*"):
            # The file may be sealed in the meantime.
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name] = path.stat().st_size
        return sizes

    def read(self) -> dict[str, SpooledSeries]:
        """Return the spool as it is now. A file that vanishes during the read was sealed or emptied.

        Logs are read before shards. So a record that moves from log to shard is seen in at least one of them.
        """
        found: dict[str, SpooledSeries] = {}
        self._logs = _read_all(
            self.directory.glob(LOG_GLOB),
            self._logs,
            lambda fd, path, before: read_open_log(fd, path, before=before),
        )
        self._shards = _read_all(
            self.directory.glob(PARTIAL_GLOB),
            self._shards,
            lambda fd, _, before: read_shard(fd, before=before),
        )
        for log in self._logs.values():
            for logged in log.scanned.records:
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


def _read_all(
    paths: Iterable[Path],
    before: Mapping[str, _Read[S]],
    scan: Callable[[int, Path, S | None], S | None],
) -> dict[str, _Read[S]]:
    found: dict[str, _Read[S]] = {}
    for path in sorted(paths):
        with contextlib.suppress(FileNotFoundError), opened(path, os.O_NONBLOCK) as fd:
            size, known = os.fstat(fd).st_size, before.get(path.name)
            if known is not None and not known.still_holds(fd):
                known = None
            if known is not None and size == known.size:
                found[path.name] = known
            elif (scanned := scan(fd, path, known.scanned if known else None)) is not None:
                found[path.name] = _Read.of(fd, size, scanned)
    return found


def _tail(fd: int, end: int) -> bytes:
    count = min(_TAIL_NBYTES, end)
    return os.pread(fd, count, end - count)
