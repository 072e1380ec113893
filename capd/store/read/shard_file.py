"""The files that are open for reading, and the records that their journals name.

A file stays open while its path still leads to it. Its descriptor is closed with the last reference, so another read
never closes it during a read.

The index of a shard has the places of its chunks. The COMMIT frame after a record's chunks names their record and its
shape. Both have checksums. The catalog has none, so readers trust index and COMMIT.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.store.format.frames import (
    Commit,
    CommitHeads,
    FileHeader,
    FrameKind,
    SeriesHeader,
    decode_heads,
    decode_payload,
    payload_is_sound,
    read_frame,
)
from capd.store.format.sharding_index import chunk_places, index_entries
from capd.store.read.recent import Recent
from capd.store.scan.scan import read_shard

__all__ = ["Committed", "FileCache", "Identity", "Place", "ShardFile", "is_same_series"]

Identity: TypeAlias = tuple[int, int, int, int]
# Offset and length in bytes.
Place: TypeAlias = tuple[int, int]


class Committed(NamedTuple):
    """One record in a COMMIT frame. slots: the index entries of its chunks, or of the chunk of its batch."""

    capture: tuple[bytes, int, tuple[int, ...]]
    slots: frozenset[int]


class ShardFile:
    """A sealed shard, `.partial` or small log that is open for reading until nothing refers to it."""

    def __init__(self, path: str) -> None:
        """Open the file. Raises OSError if this fails."""
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # This is not a __del__, which may run after the module's globals are gone when the interpreter ends.
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.identity = _identity(os.fstat(self.fd))
        # `belongs_to` is called again and again for one series.
        self._asked: SeriesHeader | None = None
        self._belongs: bool | None = None
        self._entries: NDArray[np.uint64] | None = None
        # Slot → place, from all COMMIT frames.
        self._journal: dict[int, Place] | None = None
        self._committed: dict[int, Committed] = {}

    @property
    def nbytes(self) -> int:
        """The size of the file when it was opened."""
        return self.identity[2]

    def read(self, place: Place) -> bytes:
        """Return the bytes at a place; fewer if the file ends before. Raises OSError."""
        return os.pread(self.fd, place[1], place[0])

    def belongs_to(self, header: SeriesHeader, shard: int) -> bool | None:
        """Return whether its HEADER frame names this shard of this series; None if it has no intact HEADER."""
        if self._asked is not header:
            first = read_frame(self.fd, 0, self.nbytes)
            is_header = first is not None and first.kind is FrameKind.HEADER
            file = decode_payload(self.fd, first) if first is not None and is_header else None
            self._belongs = None
            if isinstance(file, FileHeader) and file.series is not None:
                self._belongs = file.shard == shard and is_same_series(file.series, header)
            self._asked = header
        return self._belongs

    def places(self, slots: Mapping[int, int], header: SeriesHeader, shard: int) -> dict[int, Place]:
        """Return the places of chunks in a sealed shard, by ordinal. COMMIT frames replace a damaged index.

        Args:
            slots: The index entries of the chunks, by ordinal.
            header: The series of the shard.
            shard: The number of the shard.

        Returns:
            The places. A chunk that is not in the shard is missing.

        Raises:
            DamagedRecord: A place is outside of the file.
        """
        if self._entries is None and self._journal is None:
            self._entries = index_entries(self.fd, header.geometry.shard_slots)
        journal = self._read_journal(header, shard) if self._entries is None else {}
        return chunk_places(self._entries, journal, slots, self.nbytes)

    @property
    def has_index(self) -> bool:
        """Whether `places` used an intact sharding index."""
        return self._entries is not None

    def committed(
        self, number: int, places: Sequence[Place], header: SeriesHeader, shard: int
    ) -> Committed | None:
        """Return record `number`, with its chunks at `places`, as its COMMIT names it; None without intact COMMIT."""
        found = self._committed.get(number)
        if found is None and places and self._journal is None:
            # The COMMIT nearly always follows the last chunk directly.
            offset, nbytes = max(places)
            follower = read_frame(self.fd, offset + nbytes, self.nbytes)
            if follower is not None and follower.kind is FrameKind.COMMIT:
                payload = os.pread(self.fd, follower.nbytes, follower.offset)
                with contextlib.suppress(msgspec.DecodeError):
                    if payload_is_sound(follower, payload):
                        self._note(decode_heads(payload))
                found = self._committed.get(number)
        # The exceptions: a chunk shared with an earlier record, a batch that grew, a record without elements.
        if found is None:
            self._read_journal(header, shard)
            found = self._committed.get(number)
        return found

    def _read_journal(self, header: SeriesHeader, shard: int) -> dict[int, Place]:
        if self._journal is None:
            scanned = read_shard(self.fd, (header, shard))
            for run in () if scanned is None else scanned.runs:
                self._note(run.commit)
            self._journal = {} if scanned is None else scanned.index
        return self._journal

    def _note(self, commit: Commit | CommitHeads) -> None:
        slots = frozenset(slot for slot, _, _ in commit.chunks)
        for number, row in enumerate(commit.rows, commit.first):
            self._committed[number] = Committed(row.capture, slots)


def is_same_series(a: SeriesHeader, b: SeriesHeader) -> bool:
    """Return whether two headers describe the same array: same key, and same places and encoding of elements."""
    return (a.path, a.key, a.dtype, a.codec, a.geometry) == (b.path, b.key, b.dtype, b.codec, b.geometry)


class FileCache:
    """A cache that keeps the last `limit` files open."""

    def __init__(self, limit: int) -> None:
        self._open: Recent[str, ShardFile] = Recent(limit)

    def open(self, path: str) -> ShardFile:
        """Return the file that is at this path now. Raises FileNotFoundError or another OSError."""
        now = _identity(os.stat(path))
        held = self._open.get(path)
        if held is None or held.identity != now:
            held = ShardFile(path)
            self._open.put(path, held)
        return held


def _identity(stat: os.stat_result) -> Identity:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
