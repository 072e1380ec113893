"""Small records between the node's log and their shards: full chunks move at once, the rest when it must.

They are acknowledged already: if the disk refuses, or one of them is damaged, they stay in the log, readable
from there, and the next call tries again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from capd.errors import StoreError
from capd.store.decode import decode
from capd.store.encode import as_array, encode_batch
from capd.store.failpoints import failpoint
from capd.store.frames import RecordRow
from capd.store.open_files import OpenFiles
from capd.store.series import Series
from capd.store.shards import EncodedChunk, ShardWriter
from capd.store.small import NewSmall, SmallLog, SmallRecord, read_small

__all__ = ["SmallRecords"]

logger = logging.getLogger(__name__)


class SmallRecords:
    """The small records of one run store; owned by the append thread."""

    def __init__(
        self,
        log: SmallLog,
        files: OpenFiles,
        shard_for: Callable[[Series, int], ShardWriter],
        append: Callable[[Series, int, list[RecordRow], Iterable[EncodedChunk]], int],
        moved: Callable[[Series, int, int, int], None],
    ) -> None:
        """shard_for, append: the run store's ways into shards. moved: told (series, first, count, stored bytes)."""
        self._log, self._files = log, files
        self._shard_for, self._append, self._moved = shard_for, append, moved
        self._stuck: set[str] = set()  # series whose small records could not be moved; said once
        self._released: Counter[int] = Counter()  # by log: records in shards that are not durable yet

    def commit(self, series: Sequence[Series], records: Sequence[NewSmall]) -> None:
        """Append records to the log, in one write. Raises OSError; then nothing of them remains."""
        for owner, place in zip(series, self._log.append(records), strict=True):
            owner.waiting.append(place)

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

    def _settle_batch(self, series: Series, first: int, places: Sequence[SmallRecord]) -> None:
        geometry, chain = series.geometry, series.chain
        records, rows = [], []
        for log, group in groupby(places, key=lambda place: place.log):
            fd = self._files.get(self._log.path(log))
            for place in group:
                raw, commit, _ = read_small(fd, place.offset)
                rows.append(commit.rows[0])
                records.append(as_array(raw, chain.stored, rows[-1].shape))
        slot = geometry.slot(first, 0)
        at = first % geometry.batch
        held = None
        if at:
            shard = self._shard_for(series, first)
            offset, nbytes = shard.index[slot]
            held = decode(chain, shard.read(offset, nbytes), (geometry.batch, *geometry.chunk))
        payload = encode_batch(records, at, held, geometry, chain)
        raw_nbytes = sum(row.nbytes for row in rows)
        failpoint("settle.before_append")
        written = self._append(series, first, rows, [EncodedChunk(slot, 0, payload, raw_nbytes)])
        series.waiting.drop(len(places))
        self._moved(series, first, len(rows), written)
        self._released.update(place.log for place in places)
        failpoint("settle.after_append")
        if not self._files.durable:
            self.release()

    def release(self) -> None:
        """Let the log delete files whose records stand in shards; a durable store calls it behind its group sync."""
        for log, count in self._released.items():
            self._log.release(log, count)
        self._released.clear()

    def adopt(self, series: Series) -> None:
        """Count the small records that recovery found waiting."""
        for place in series.waiting.first(len(series.waiting)):
            self._log.adopt(place.log)

    def held_back(self, all_series: Iterable[Series]) -> list[Series]:
        """Series that keep the oldest log from being deleted, if too many logs are held back."""
        oldest = self._log.oldest
        if oldest is None:
            return []
        return [s for s in all_series if s.waiting and s.waiting.first(1)[0].log == oldest]

    def rotate(self) -> None:
        """Finish the current log."""
        self._log.rotate()
