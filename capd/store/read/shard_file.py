"""Files opened for reading: kept open while they are what bears the name, and what their journals vouch for.

A descriptor is closed when the last thing that uses it lets go, so a read that has begun is never diverted by
another one that makes room. A shard's index says where a chunk lies; the COMMIT frame that follows a record's
chunks says which record they belong to and what shape it has. Both carry checksums, the catalog does not, so
readers go by these two.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.errors import DamagedRecord
from capd.store.format.frames import (
    FileHeader,
    Frame,
    FrameKind,
    SeriesHeader,
    decode_payload,
    payload_is_sound,
    read_frame,
)
from capd.store.format.sharding_index import EMPTY, index_entries
from capd.store.read.recent import Recent
from capd.store.scan.scan import read_shard

__all__ = ["Committed", "FileCache", "Identity", "Place", "ShardFile", "is_same_series"]

Identity: TypeAlias = tuple[int, int, int, int]
Place: TypeAlias = tuple[int, int]  # offset, bytes


class Committed(NamedTuple):
    """What a COMMIT frame says about one record. slots: index entries of its chunks (of its batch's)."""

    client: bytes
    sequence: int
    shape: tuple[int, ...]
    slots: frozenset[int]


class _Row(msgspec.Struct, array_like=True):
    """The first fields of a RecordRow; the decoder skips the others."""

    client: bytes
    sequence: int
    shape: tuple[int, ...]


class _Commit(msgspec.Struct, array_like=True):
    first: int
    rows: list[_Row]
    chunks: list[tuple[int, int, int]]


_decode_commit = msgspec.msgpack.Decoder(_Commit).decode


class ShardFile:
    """A sealed shard, `.partial` or small log, open for reading until nothing refers to it.

    Raises OSError where it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # No __del__: at the end of the interpreter it may run after the module's globals are gone.
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.identity = _identity(os.fstat(self.fd))
        self._asked: SeriesHeader | None = None  # `belongs_to` answers for one series, again and again
        self._belongs: bool | None = None
        self._entries: NDArray[np.uint64] | None = None
        self._journal: dict[int, Place] | None = None  # slot → place, from all COMMIT frames
        self._committed: dict[int, Committed] = {}

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened."""
        return self.identity[2]

    def belongs_to(self, header: SeriesHeader, shard: int) -> bool | None:
        """Whether its HEADER frame names this shard of this series; None where no sound one begins the file."""
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
        """Where the chunks (ordinal → index entry) lie in a sealed shard; those that lie nowhere are absent.

        Where the index is damaged the COMMIT frames stand in for it. Raises DamagedRecord for a place outside of
        the file.
        """
        if self._entries is None and self._journal is None:
            self._entries = index_entries(self.fd, header.geometry.shard_slots)
        journal = self._read_journal(header, shard) if self._entries is None else {}
        found: dict[int, Place] = {}
        for ordinal, slot in slots.items():
            if self._entries is None:
                place = journal.get(slot)
            else:
                offset, nbytes = self._entries[slot].tolist()
                place = None if offset == EMPTY else (offset, nbytes)
            if place is not None:
                if sum(place) > self.nbytes:
                    raise DamagedRecord(f"index entry {slot} points beyond the end of the shard")
                found[ordinal] = place
        return found

    @property
    def has_index(self) -> bool:
        """Whether `places` went by a sound sharding index."""
        return self._entries is not None

    def committed(
        self, number: int, places: Sequence[Place], header: SeriesHeader, shard: int
    ) -> Committed | None:
        """What the COMMIT of record `number`, whose chunks lie at `places`, says; None if there is no sound one."""
        found = self._committed.get(number)
        if found is None and places and self._journal is None:
            offset, nbytes = max(places)  # nearly always the COMMIT stands right behind the last chunk
            follower = read_frame(self.fd, offset + nbytes, self.nbytes)
            if follower is not None and follower.kind is FrameKind.COMMIT:
                self._note(follower)
                found = self._committed.get(number)
        # chunks shared with an earlier record, a batch that grew, a record without elements
        if found is None:
            self._read_journal(header, shard)
            found = self._committed.get(number)
        return found

    def _read_journal(self, header: SeriesHeader, shard: int) -> dict[int, Place]:
        if self._journal is None:
            scanned = read_shard(self.fd, (header, shard))
            for run in () if scanned is None else scanned.runs:
                slots = frozenset(slot for slot, _, _ in run.commit.chunks)
                for number, row in enumerate(run.commit.rows, run.commit.first):
                    self._committed[number] = Committed(row.client, row.sequence, row.shape, slots)
            self._journal = {} if scanned is None else scanned.index
        return self._journal

    def _note(self, frame: Frame) -> None:
        payload = os.pread(self.fd, frame.nbytes, frame.offset)
        if not payload_is_sound(frame, payload):
            return
        try:
            commit = _decode_commit(payload)
        except msgspec.MsgspecError:
            return
        slots = frozenset(slot for slot, _, _ in commit.chunks)
        for number, row in enumerate(commit.rows, commit.first):
            self._committed[number] = Committed(row.client, row.sequence, row.shape, slots)


def is_same_series(a: SeriesHeader, b: SeriesHeader) -> bool:
    """Whether two headers mean the same array: what decides where and how elements lie, and whose they are."""
    return (a.path, a.key, a.dtype, a.codec, a.geometry) == (b.path, b.key, b.dtype, b.codec, b.geometry)


class FileCache:
    """Keeps the `limit` files open that were read last."""

    def __init__(self, limit: int) -> None:
        self._open: Recent[str, ShardFile] = Recent(limit)

    def open(self, path: str) -> ShardFile:
        """The file that bears this name now. Raises FileNotFoundError or another OSError."""
        now = _identity(os.stat(path))
        held = self._open.get(path)
        if held is None or held.identity != now:
            held = ShardFile(path)
            self._open.put(path, held)
        return held


def _identity(stat: os.stat_result) -> Identity:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
