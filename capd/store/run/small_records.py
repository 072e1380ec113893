"""The small records of a run store: pending in the node's log until they move to their shards as chunks.

Pending records are already acknowledged. If the disk refuses or a record is damaged, they stay in the log. Readers
find them there, and the next attempt starts with them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.errors import StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.disk.open_files import OpenFiles
from capd.store.format.decode import decode
from capd.store.format.dtypes import stored_shape
from capd.store.format.encode import as_array, encode_batch
from capd.store.format.log_places import LogPlace, log_of, offset_of
from capd.store.shards.series import SeriesState
from capd.store.shards.small_log import Small, SmallLog, read_small
from capd.store.shards.writer import EncodedChunk

__all__ = ["Batch", "Room", "SmallRecords"]

logger = logging.getLogger(__name__)


# The approximate memory of a record without its elements.
_ROW_NBYTES = 512


class Room:
    """The memory budget for logged records on their way to a shard. All run stores of an append thread share one."""

    def __init__(self, nbytes: int = 128 << 20) -> None:
        self.left = nbytes


class _Fresh:
    """The last logged records that fit the budget. A shard gets them without reading the log."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held: dict[LogPlace, Small] = {}

    def keep(self, place: LogPlace, small: Small) -> None:
        """Keep a record if the budget allows it. Older records have priority because they are needed earlier."""
        nbytes = len(small.data) + _ROW_NBYTES
        if nbytes <= self._room.left:
            self._held[place] = small
            self._room.left -= nbytes

    def take(self, place: LogPlace) -> Small | None:
        """Remove and return the record logged at `place`; None if it is not kept."""
        small = self._held.pop(place, None)
        if small is not None:
            self._room.left += len(small.data) + _ROW_NBYTES
        return small

    def clear(self) -> None:
        """Remove all records."""
        for place in list(self._held):
            self.take(place)


class Batch(NamedTuple):
    """Small records that share a chunk. rows: their encoded rows. session, sequence: those of the first record."""

    chunk: EncodedChunk
    rows: list[bytes]
    session: int
    sequence: int


class SmallRecords:
    """The small records of one run store; owned by the append thread."""

    def __init__(self, log: SmallLog, files: OpenFiles, room: Room) -> None:
        """room: the memory budget for logged records."""
        self._log, self._files = log, files
        self._fresh = _Fresh(room)
        # Series whose small records could not be moved. Each is logged once.
        self._stuck: set[str] = set()
        # By log: the records in shards that are not durable yet.
        self._released: Counter[int] = Counter()

    def commit(self, records: Sequence[tuple[SeriesState, int, Small]]) -> None:
        """Append records to the log, in one write.

        Raises:
            OSError: The disk refused. Nothing of the records remains.
        """
        places = self._log.append([(series.header, number, small) for series, number, small in records])
        for (series, _, small), place in zip(records, places, strict=True):
            series.waiting.append(place)
            self._fresh.keep(place, small)

    @contextlib.contextmanager
    def moving(self, series: SeriesState) -> Iterator[None]:
        """Wrap the moves of a series' records. After an error they stay in the log, and one warning is logged."""
        try:
            yield
        except (OSError, StoreError) as error:
            if series.header.path not in self._stuck:
                self._stuck.add(series.header.path)
                waiting = len(series.waiting)
                logger.warning("%s: %d small records stay in the log: %s", series.header.path, waiting, error)
        else:
            self._stuck.discard(series.header.path)

    def has_chunk(self, series: SeriesState, *, full: bool) -> bool:
        """Return whether a series has pending records. full: enough of them to fill a chunk, so it is encoded once."""
        batch = series.geometry.batch
        return len(series.waiting) >= (batch - series.in_shards % batch if full else 1)

    def take_chunk(self, series: SeriesState, joined: bytes | None) -> Batch:
        """Return the next chunk of a series' pending records. They stay pending until `moved` is called.

        Args:
            series: The series, with at least one pending record. Its `in_shards` is the number of the first one.
            joined: The encoded chunk that the records continue; None if they begin a chunk.

        Raises:
            OSError: A record cannot be read.
            DamagedRecord: A record, or the chunk that they continue, is damaged.
        """
        geometry, chain, first = series.geometry, series.chain, series.in_shards
        at = first % geometry.batch
        places = series.waiting.first(geometry.batch - at)
        found = [self._fresh.take(place) or self._read(place) for place in places]
        held = None if joined is None else decode(chain, joined, (geometry.batch, *geometry.chunk))
        encoded = encode_batch(_elements(series, found), at, held, geometry, chain)
        chunk = EncodedChunk(geometry.slot(first, 0), 0, encoded, sum(len(small.data) for small in found))
        failpoint("settle.before_append")
        return Batch(chunk, [small.row for small in found], found[0].session, found[0].sequence)

    def moved(self, series: SeriesState, count: int) -> None:
        """Note that the first `count` pending records are in a shard."""
        self._released.update(map(log_of, series.waiting.first(count)))
        series.waiting.drop(count)
        failpoint("settle.after_append")
        if not self._files.durable:
            self.release()

    def _read(self, place: LogPlace) -> Small:
        raw, commit, _ = read_small(self._files.get(self._log.path(log_of(place))), offset_of(place))
        return Small.of(commit.rows[0], raw)

    def release(self) -> None:
        """Let the log delete files whose records are all in shards. A durable store calls this after its group sync."""
        for log, count in self._released.items():
            self._log.release(log, count)
        self._released.clear()

    def adopt(self, series: SeriesState) -> None:
        """Count the pending small records that recovery found."""
        for place in series.waiting.first(len(series.waiting)):
            self._log.adopt(log_of(place))

    def held_back(self, all_series: Iterable[SeriesState]) -> list[SeriesState]:
        """Return the series that prevent the deletion of the oldest log; none if there are few logs."""
        oldest = self._log.oldest
        if oldest is None:
            return []
        return [s for s in all_series if s.waiting and log_of(s.waiting.first(1)[0]) == oldest]

    def forget(self) -> None:
        """Drop all records from memory."""
        self._fresh.clear()


def _elements(series: SeriesState, found: Sequence[Small]) -> list[NDArray[np.generic]] | NDArray[np.generic]:
    """Return the records as arrays, or as one array if each fills its part of the chunk."""
    stored, chunk = series.chain.stored, series.geometry.chunk
    shapes = [stored_shape(series.header.dtype, small.shape) for small in found]
    if all(shape == chunk for shape in shapes):
        whole = np.frombuffer(b"".join([small.data for small in found]), dtype=stored)
        return whole.reshape(len(found), *chunk)
    return [as_array(small.data, stored, shape) for small, shape in zip(found, shapes, strict=True)]
