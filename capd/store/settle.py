"""Small records between the node's log and their shards: full chunks move at once, the rest when it must.

They are acknowledged already: if the disk refuses, or one of them is damaged, they stay in the log, readable
from there, and the next call tries again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from capd.errors import DamagedRecord, StoreError
from capd.store.decode import decode
from capd.store.dtypes import stored_shape
from capd.store.encode import as_array, encode_batch
from capd.store.failpoints import failpoint
from capd.store.format.log_places import LogPlace, log_of, offset_of
from capd.store.open_files import OpenFiles
from capd.store.series import Series
from capd.store.shards import EncodedChunk, ShardWriter
from capd.store.small import Small, SmallLog, read_small

__all__ = ["Room", "SmallRecords"]

logger = logging.getLogger(__name__)


_ROW_NBYTES = 512  # about what a record takes beside its elements


class Room:
    """Memory for logged records on their way to a shard; the run stores of an append thread share one."""

    def __init__(self, nbytes: int = 128 << 20) -> None:
        self.left = nbytes


class _Fresh:
    """What was logged last, as far as there is room: a shard gets it without reading the log."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held: dict[LogPlace, Small] = {}

    def keep(self, place: LogPlace, small: Small) -> None:
        """Keep a record if there is room; those that came before are needed earlier."""
        nbytes = len(small.data) + _ROW_NBYTES
        if nbytes <= self._room.left:
            self._held[place] = small
            self._room.left -= nbytes

    def take(self, place: LogPlace) -> Small | None:
        """The record logged at `place`, which is forgotten, or None."""
        small = self._held.pop(place, None)
        if small is not None:
            self._room.left += len(small.data) + _ROW_NBYTES
        return small

    def clear(self) -> None:
        """Forget everything."""
        for place in list(self._held):
            self.take(place)


class SmallRecords:
    """The small records of one run store; owned by the append thread."""

    def __init__(
        self,
        log: SmallLog,
        files: OpenFiles,
        shard_for: Callable[[Series, int], ShardWriter],
        append: Callable[[Series, int, Sequence[bytes], Iterable[EncodedChunk], int, int], int],
        moved: Callable[[Series, int, int, int], None],
        room: Room,
    ) -> None:
        """shard_for, append: the run store's ways into shards. moved: told (series, first, count, stored bytes)."""
        self._log, self._files = log, files
        self._shard_for, self._append, self._moved = shard_for, append, moved
        self._fresh = _Fresh(room)
        self._stuck: set[str] = set()  # series whose small records could not be moved; said once
        self._released: Counter[int] = Counter()  # by log: records in shards that are not durable yet

    def commit(self, records: Sequence[tuple[Series, int, Small]]) -> None:
        """Append records to the log, in one write. Raises OSError; then nothing of them remains."""
        places = self._log.append([(series.header, number, small) for series, number, small in records])
        for (series, _, small), place in zip(records, places, strict=True):
            series.waiting.append(place)
            self._fresh.keep(place, small)

    def settle(self, series: Series, *, full_chunks: bool = False) -> None:
        """Move the waiting small records of a series into its shard, chunk by chunk.

        full_chunks: leave the last ones in the log until they fill a chunk, which is then encoded once.
        """
        batch = series.geometry.batch
        try:
            while series.waiting:
                first = series.in_shards
                room = batch - first % batch
                if full_chunks and len(series.waiting) < room:
                    break
                self._settle_batch(series, first, series.waiting.first(room))
        except (OSError, StoreError) as error:
            if series.header.path not in self._stuck:
                self._stuck.add(series.header.path)
                waiting = len(series.waiting)
                logger.warning("%s: %d small records stay in the log: %s", series.header.path, waiting, error)
        else:
            self._stuck.discard(series.header.path)

    def _settle_batch(self, series: Series, first: int, places: Sequence[LogPlace]) -> None:
        geometry, chain = series.geometry, series.chain
        found = [self._fresh.take(place) or self._read(place) for place in places]
        shapes = [stored_shape(series.header.dtype, small.shape) for small in found]
        records: list[NDArray[np.generic]] | NDArray[np.generic]
        if all(shape == geometry.chunk for shape in shapes):
            records = np.frombuffer(b"".join([small.data for small in found]), dtype=chain.stored)
            records = records.reshape(len(found), *geometry.chunk)
        else:
            records = [
                as_array(small.data, chain.stored, shape) for small, shape in zip(found, shapes, strict=True)
            ]
        slot = geometry.slot(first, 0)
        at = first % geometry.batch
        held = None
        if at:
            shard = self._shard_for(series, first)
            if slot not in shard.index:
                raise DamagedRecord(f"the chunk that they join is lost in {shard.path.name}")
            offset, nbytes = shard.index[slot]
            held = decode(chain, shard.read(offset, nbytes), (geometry.batch, *geometry.chunk))
        encoded = encode_batch(records, at, held, geometry, chain)
        chunk = EncodedChunk(slot, 0, encoded, sum(len(small.data) for small in found))
        failpoint("settle.before_append")
        rows = [small.row for small in found]
        written = self._append(series, first, rows, [chunk], found[0].session, found[0].sequence)
        series.waiting.drop(len(places))
        self._moved(series, first, len(found), written)
        self._released.update(map(log_of, places))
        failpoint("settle.after_append")
        if not self._files.durable:
            self.release()

    def _read(self, place: LogPlace) -> Small:
        raw, commit, _ = read_small(self._files.get(self._log.path(log_of(place))), offset_of(place))
        return Small.of(commit.rows[0], raw)

    def release(self) -> None:
        """Let the log delete files whose records stand in shards; a durable store calls it behind its group sync."""
        for log, count in self._released.items():
            self._log.release(log, count)
        self._released.clear()

    def adopt(self, series: Series) -> None:
        """Count the small records that recovery found waiting."""
        for place in series.waiting.first(len(series.waiting)):
            self._log.adopt(log_of(place))

    def held_back(self, all_series: Iterable[Series]) -> list[Series]:
        """Series that keep the oldest log from being deleted, if too many logs are held back."""
        oldest = self._log.oldest
        if oldest is None:
            return []
        return [s for s in all_series if s.waiting and log_of(s.waiting.first(1)[0]) == oldest]

    def rotate(self) -> None:
        """Finish the current log."""
        self._log.rotate()

    def forget(self) -> None:
        """Keep no record in memory any more."""
        self._fresh.clear()
