"""A shard in an object store, read by ranges: the index by one request, the chunks with their COMMIT by another.

A small shard is read whole. The manifest vouches for the object, so its HEADER frame is not read. If the index or a
COMMIT is damaged, the journal of the whole shard replaces it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.store.format.frames import (
    FRAME_NBYTES,
    Commit,
    CommitHeads,
    FrameKind,
    SeriesHeader,
    decode_heads,
    parse_frame,
    payload_is_sound,
)
from capd.store.format.sharding_index import chunk_places, entries_in, index_nbytes
from capd.store.objects.bucket import Bucket
from capd.store.remote.windows import Span, WindowCache
from capd.store.scan.scan import read_shard
from capd.store.segments.series_table import ShardObject

__all__ = ["RemoteShard", "ShardWindows"]

# Offset and length in bytes.
Place = tuple[int, int]
Capture = tuple[bytes, int, tuple[int, ...]]

_WHOLE_NBYTES = 4 << 20
# A shard may be continued while it is read.
_LONGEST_NBYTES = 1 << 30
# A COMMIT of many small records is larger than this, and then costs one more request.
_COMMIT_NBYTES = 64 << 10


class ShardWindows:
    """The bytes of a shard that one read fetched.

    Attributes:
        path: The address of the shard.
        identity: The object and its version.
    """

    def __init__(self, shard: RemoteShard, windows: Sequence[tuple[int, bytes]]) -> None:
        self.path, self.identity = shard.path, shard.identity
        self._shard, self._windows = shard, windows

    def read(self, place: Place) -> bytes:
        """Return the bytes at a place; fewer if the object ends before."""
        offset, nbytes = place
        for start, held in self._windows:
            if start <= offset and offset + nbytes <= start + len(held):
                return held[offset - start : offset - start + nbytes]
        return self._shard.read(place)


class RemoteShard:
    """A shard object that a manifest names.

    Attributes:
        path: Its address.
        identity: The object and its version.
    """

    def __init__(self, bucket: Bucket, cache: WindowCache, key: str, known: ShardObject) -> None:
        self.path = str(bucket.address / key)
        self._bucket, self._cache, self._key = bucket, cache, key
        self.nbytes = self._known_nbytes = known.nbytes
        self.identity: tuple[str, int, int] = (key, known.nbytes, known.crc32c)
        self._is_read = False
        self._entries: NDArray[np.uint64] | None = None
        # Slot → place, from all COMMIT frames.
        self._journal: dict[int, Place] | None = None
        self._committed: dict[int, tuple[Capture, frozenset[int]]] = {}

    def renew(self) -> bool:
        """Forget what is known if the object has changed since. Return whether it has.

        Raises:
            ObjectStoreError: The store cannot be asked.
        """
        now = self._bucket.head(self._key)
        if now is None or now.nbytes == self.nbytes:
            return False
        self.nbytes = now.nbytes
        self.identity = (self._key, now.nbytes, 0)
        self._is_read, self._entries, self._journal, self._committed = False, None, None, {}
        return True

    def read(self, place: Place) -> bytes:
        """Return the bytes at a place; fewer if the object ends before."""
        offset, nbytes = place
        if not nbytes:
            return b""
        [(start, held), *_] = self._cache.fetch(self.identity, self._key, [(offset, offset + nbytes)])
        return held[offset - start : offset - start + nbytes]

    def places(self, slots: Mapping[int, int], header: SeriesHeader, shard: int) -> dict[int, Place]:
        """Return the places of chunks by ordinal, as the index has them, or else the journal.

        Raises:
            DamagedRecord: A place is outside of the object.
            ObjectStoreError: The object cannot be read.
        """
        self._read_index(header)
        journal = self._read_journal(header, shard) if self._entries is None else {}
        return chunk_places(self._entries, journal, slots, self.nbytes)

    @property
    def has_index(self) -> bool:
        """Whether `places` used an intact sharding index."""
        return self._entries is not None

    @property
    def is_other_version(self) -> bool:
        """Whether the object has commits, and another size than the manifest says."""
        return bool(self._committed) and self.nbytes != self._known_nbytes

    def fetch(self, wanted: Iterable[Place], last: Place | None) -> ShardWindows:
        """Fetch chunks, and the COMMIT that follows the last chunk of a record."""
        spans: list[Span] = [(offset, offset + nbytes) for offset, nbytes in wanted if nbytes]
        if last is not None:
            end = sum(last)
            spans.append((end, min(end + _COMMIT_NBYTES, self.nbytes)))
        spans = [span for span in spans if span[0] < span[1]]
        return ShardWindows(self, self._cache.fetch(self.identity, self._key, spans))

    def committed(
        self, number: int, windows: ShardWindows, last: Place | None, header: SeriesHeader, shard: int
    ) -> tuple[Capture, frozenset[int]] | None:
        """Return the capture of a record and the index entries of its chunks, as its COMMIT names them.

        None if there is no intact COMMIT.
        """
        if number not in self._committed and last is not None and self._journal is None:
            self._read_commit(windows, sum(last))
        # The exceptions: a chunk shared with an earlier record, a batch that grew, a record without elements.
        if number not in self._committed:
            self._read_journal(header, shard)
        return self._committed.get(number)

    def _read_index(self, header: SeriesHeader) -> None:
        if self._is_read:
            return
        nbytes = index_nbytes(header.geometry.shard_slots)
        whole = self.nbytes if self.nbytes <= _WHOLE_NBYTES else 0
        tail, size = self._bucket.get_tail(self._key, max(nbytes, whole))
        # A shard that was continued is longer than its manifest says, and holds the same records. One that was cut off
        # lost its index, and the journal names what is left.
        if size != self.nbytes:
            self.nbytes, self.identity = size, (self._key, size, 0)
        self._cache.put(self.identity, size - len(tail), tail)
        self._entries = entries_in(tail[-nbytes:], header.geometry.shard_slots)
        self._is_read = True

    def _read_commit(self, windows: ShardWindows, end: int) -> None:
        frame = parse_frame(windows.read((end, min(FRAME_NBYTES, self.nbytes - end))), 0, end)
        if frame is None or frame.kind is not FrameKind.COMMIT or frame.offset + frame.nbytes > self.nbytes:
            return
        payload = windows.read((frame.offset, frame.nbytes))
        if payload_is_sound(frame, payload):
            try:
                self._note(decode_heads(payload))
            except msgspec.DecodeError:
                return

    def _read_journal(self, header: SeriesHeader, shard: int) -> dict[int, Place]:
        if self._journal is None:
            with tempfile.TemporaryFile(prefix="capd-") as file:
                self._bucket.get_into(self._key, file, at_most=max(2 * self.nbytes, _LONGEST_NBYTES))
                scanned = read_shard(file.fileno(), (header, shard))
            for run in () if scanned is None else scanned.runs:
                self._note(run.commit)
            self._journal = {} if scanned is None else scanned.index
        return self._journal

    def _note(self, commit: Commit | CommitHeads) -> None:
        slots = frozenset(slot for slot, _, _ in commit.chunks)
        for number, row in enumerate(commit.rows, commit.first):
            self._committed[number] = (row.capture, slots)
