"""Checks one shard file or `.partial` against itself: frames, checksums, COMMITs, and the sharding index."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from capd.errors import DamagedRecord
from capd.store.format.codecs import crc32c
from capd.store.format.frames import Frame, RecordRow, SeriesHeader, payload_is_sound
from capd.store.format.sharding_index import index_nbytes, read_index
from capd.store.scan.scan import ScannedShard, read_shard
from capd.store.verify.series import SeriesPromise

__all__ = ["CheckedFile", "check_file"]


@dataclass(slots=True)
class CheckedFile:
    """The result for a file.

    Attributes:
        rows: The rows in its COMMITs, by record number.
        nbytes: The bytes checked.
        header: The series that its HEADER names.
        is_foreign: It belongs to another shard, or is unreadable.
        rewritten: A Zarr tool rewrote it without frames. It is readable, but no catalog can be rebuilt from it.
        index: Slot → (offset, bytes) as readers see it.
    """

    rows: dict[int, RecordRow] = field(default_factory=dict)
    nbytes: int = 0
    header: SeriesHeader | None = None
    is_foreign: bool = False
    rewritten: bool = False
    index: dict[int, tuple[int, int]] = field(default_factory=dict)


# Takes the damaged records, the byte in the file (None for the whole file) and the description.
Find: TypeAlias = Callable[[Iterable[int], int | None, str], None]


def check_file(
    path: Path, promise: SeriesPromise, number: int, expected: int, find: Find, *, sealed: bool
) -> CheckedFile | None:
    """Check the file of a shard, which must have all records of the shard below `expected`.

    Returns:
        The result, or None if the file does not exist (any more).

    Raises:
        OSError: The file cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return _Check(fd, promise, number, expected, find, sealed=sealed).run()
    finally:
        os.close(fd)


class _Check:
    def __init__(
        self, fd: int, promise: SeriesPromise, number: int, expected: int, find: Find, *, sealed: bool
    ) -> None:
        self._fd, self._promise, self._number, self._find = fd, promise, number, find
        self._header = header = promise.header
        self._sealed = sealed
        self._begin = number * header.geometry.shard_records
        self._expected = range(self._begin, min(expected, self._begin + header.geometry.shard_records))
        # The offsets of chunks that fail their checksum.
        self._bad: set[int] = set()
        # Offset → bytes of the other chunks.
        self._good: dict[int, int] = {}
        self.out = CheckedFile()

    def run(self) -> CheckedFile:
        size = os.fstat(self._fd).st_size
        self.out.nbytes = size
        try:
            scanned = read_shard(self._fd, (self._header, self._number), self._visit)
        except OSError as error:
            return self._unusable(f"cannot be read: {error.strerror}")
        if scanned is None:
            return self._unusable("the file is empty" if size == 0 else "is not a regular file")
        if (scanned.header.path, scanned.shard) != (self._header.path, self._number):
            return self._unusable(f"holds shard {scanned.shard} of {scanned.header.path}")
        owner = (self._promise.run_ids, self._promise.node)
        if scanned.file is not None and (foreign := scanned.file.foreign(*owner)):
            return self._unusable(foreign)
        self.out.header = scanned.header
        self.out.rows = scanned.rows
        end = size - index_nbytes(self._header.geometry.shard_slots) if self._sealed else scanned.end
        self._check_index(scanned)
        self._check_gaps(scanned, end)
        self._check_chunks(scanned)
        return self.out

    def _unusable(self, what: str) -> CheckedFile:
        self.out.is_foreign = True
        self._find(self._expected, None, what)
        return self.out

    def _visit(self, fd: int, frame: Frame) -> None:
        payload = os.pread(fd, frame.nbytes, frame.offset)
        sound = payload_is_sound(frame, payload) and payload[-4:] == struct.pack("<I", frame.crc)
        if sound:
            self._good[frame.offset] = frame.nbytes
        else:
            self._bad.add(frame.offset)

    def _check_index(self, scanned: ScannedShard) -> None:
        self.out.index = scanned.index
        if not self._sealed:
            return
        try:
            self.out.index = read_index(self._fd, self._header.geometry.shard_slots)
        except DamagedRecord as error:
            self._find(scanned.rows or self._expected, None, str(error))
            return
        first = scanned.gaps[0] if scanned.gaps else (0, 0)
        early = any(first[0] <= offset < first[1] for offset, _ in self.out.index.values())
        self.out.rewritten = scanned.file is None and early
        for slot, place in scanned.index.items():
            if self.out.index.get(slot) != place:
                records = self._records_of([slot], scanned.rows)
                self._find(records, place[0], f"the index contradicts the commit of chunk {slot}")

    def _check_gaps(self, scanned: ScannedShard, end: int) -> None:
        rest = set(self._expected) | set(range(self._begin, scanned.newest + 1))
        rest -= scanned.rows.keys()
        if self.out.rewritten:
            rest -= set(range(self._begin, min(scanned.rows, default=self._expected.stop)))
        for start, stop in scanned.gaps:
            stop = min(stop, end)
            if start >= stop or (self.out.rewritten and start == 0):
                continue
            after = min((r.commit.first for r in scanned.runs if r.start >= stop), default=None)
            before = max(
                (r.commit.first + len(r.commit.rows) for r in scanned.runs if r.end <= start),
                default=self._begin,
            )
            lost = {n for n in rest if before <= n and (after is None or n < after)}
            rest -= lost
            slots = [
                slot
                for slot, (offset, nbytes) in self.out.index.items()
                if offset < stop and start < offset + nbytes
            ]
            what = "no intact frame" if not lost else "no intact frame; the commit of these records is lost"
            self._find(lost | self._records_of(slots, scanned.rows), start, f"{what} up to byte {stop}")
        if rest:
            self._find(rest, None, "no commit for these records")

    def _check_chunks(self, scanned: ScannedShard) -> None:
        """Check every chunk of the index and every chunk in a frame."""
        numbers = set(scanned.rows) | set(self._expected if self.out.rewritten else ())
        for slot, (offset, nbytes) in self.out.index.items():
            if offset in self._bad or self._good.get(offset) == nbytes:
                continue
            payload = os.pread(self._fd, nbytes, offset) if nbytes <= self.out.nbytes else b""
            if len(payload) < max(nbytes, 4) or payload[-4:] != struct.pack("<I", crc32c(payload[:-4])):
                records = self._records_of([slot], numbers)
                self._find(records, offset, f"chunk {slot} fails its checksum")
        for offset in sorted(self._bad):
            if not self._sealed and offset > scanned.end:
                # It belongs to an interrupted write.
                continue
            slots = [slot for slot, place in self.out.index.items() if place[0] == offset]
            records = self._records_of(slots, numbers)
            what = "chunk fails its checksum" if records else "a chunk that no record uses fails its checksum"
            self._find(records, offset, what)
        geometry = self._header.geometry
        for record, row in scanned.rows.items():
            ordinals = [0] if geometry.is_small else [ordinal for ordinal, _ in geometry.chunks(row.shape)]
            missing = [o for o in ordinals if geometry.slot(record, o) not in self.out.index]
            if missing and self.out.index:
                self._find([record], None, f"chunks {missing} are not in the index")

    def _records_of(self, slots: Iterable[int], rows: Iterable[int]) -> set[int]:
        """Return the records with elements in these chunks."""
        geometry = self._header.geometry
        batches = {slot // geometry.chunks_per_batch for slot in slots}
        return {n for n in rows if n % geometry.shard_records // geometry.batch in batches}
