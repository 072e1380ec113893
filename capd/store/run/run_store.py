"""The store of one run on one node: commits records, seals shards, keeps the catalog. Owned by the append thread.

The order of a commit: frames → catalog row (batched) → the caller acknowledges. In a durable store the group sync
comes before the acknowledgement.

The order of a seal: rows → index → sync → rename → sync directories → attributes → shape → catalog mark. Every step
can be repeated. Recovery continues after the last completed step (`capd.store.recover.open_node`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import SeriesRow, SessionRow
from capd.store.catalog.totals import Held, held_by, log_and_catalog_nbytes
from capd.store.catalog.writer import new_row
from capd.store.disk.layout import Layout, partial_path, shard_path
from capd.store.disk.open_files import LostWrites, OpenFiles
from capd.store.disk.syncing import Syncing
from capd.store.format.encode import ChunkResult
from capd.store.format.frames import FORMAT_VERSION, FileHeader, RecordRow, session_of
from capd.store.format.log_places import LOG_GLOB
from capd.store.recover.open_node import Recovered, open_node
from capd.store.remote.moved_rows import MovedRows
from capd.store.remove.series import finish_removal
from capd.store.run.figures import Durations, NonFinite
from capd.store.run.options import StoreOptions
from capd.store.run.pending_rows import PendingRows
from capd.store.run.planner import Planner
from capd.store.run.small_records import Room, SmallRecords
from capd.store.run.usage import QuotaUsage
from capd.store.shards.seal import finish_files, publish
from capd.store.shards.series import Plan, SeriesState
from capd.store.shards.small_log import Small, SmallLog
from capd.store.shards.writer import EncodedChunk, ShardWriter
from capd_client.protocol.key import Key

__all__ = ["RunStore"]


class RunStore:
    """The writer of `<root>/<run_id>.zarr` for one node.

    `plan` and `plan_for` may be called from any thread. Everything else belongs to the append thread.
    """

    def __init__(
        self,
        root: Path,
        run_id: str,
        node: str,
        options: StoreOptions,
        room: Room | None = None,
        durations: Durations | None = None,
    ) -> None:
        """Create the run, or open and recover it. Without `room` or `durations`, the store gets its own.

        Raises:
            NotAStore: The directory is not a run, or its format is newer.
            StoreError: The run cannot be opened or recovered.
        """
        self.options = options
        self.path = root / f"{run_id}.zarr"
        self.non_finite = NonFinite()
        self._durations = durations or Durations()
        self._file_header = FileHeader(FORMAT_VERSION, run_id, node)
        finish_removal(self.path)
        self._layout = Layout(self.path, run_id, node)
        try:
            self._open(room)
        except BaseException:
            self._layout.close()
            raise

    def _open(self, room: Room | None) -> None:
        options = self.options
        self._files = OpenFiles(options.open_files, durable=options.durability == "durable")
        self._syncing = Syncing(self._layout, self._files, self._open_shards)
        found: Recovered = open_node(self._layout, self._files, complete=MovedRows(self._layout.node))
        self._catalog = found.catalog
        self._series = {series.header.path: series for series in found.series}
        self._pending = PendingRows(found)
        planner = Planner(options, found.series)
        self.plan, self.plan_for = planner.plan, planner.plan_for
        self._log = SmallLog(self._layout.spool, self._file_header, options.log_nbytes, self._files)
        self._small = SmallRecords(self._log, self._files, room or Room())
        # Series with a full chunk in the log, or a full shard.
        self._ripe: set[str] = set()
        self.usage = QuotaUsage(options.quota, self._file_header.run_id, found.series)
        self._adopt(found)

    def _adopt(self, found: Recovered) -> None:
        for series in found.series:
            self._pending.changed(series)
            self._small.adopt(series)
        # A killed daemon may have left written but unsynced data.
        for pattern in ("*.partial", LOG_GLOB):
            for path in self._layout.spool.glob(pattern):
                self._files.adopted(path, path.stat().st_size)
        self.sync()
        self.flush_catalog()
        self._seal(found.unfinished)

    @property
    def spool(self) -> Path:
        """The directory of files that are not sealed yet."""
        return self._layout.spool

    # -- commits ------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, row: RecordRow, chunks: Iterable[ChunkResult]) -> None:
        """Commit a large record from its encoded chunks.

        Raises:
            OSError: The disk refused. Nothing of the record remains.
            StoreError: The store does not accept records. Nothing of the record remains.
            QuotaReached: The record does not fit into a quota.
        """
        self.usage.check([(plan, row.nbytes)])
        series = self._series_of(plan)
        geometry = series.geometry
        number = series.row.records
        encoded = (
            EncodedChunk(geometry.slot(number, c.ordinal), c.ordinal, c.encoded, c.raw_nbytes) for c in chunks
        )
        written = self._append(series, number, [row], encoded, session_of(row.client), row.sequence)
        self._pending.add(series, row, new_row(series.row.id, number, row, written))
        self.usage.note(series)
        self.non_finite.add(row.stats)

    def commit_small(self, records: Sequence[tuple[Plan, RecordRow, bytes]]) -> None:
        """Commit small records (plan, row, raw bytes) to the node's log, in one write.

        Raises:
            OSError: The disk refused. Nothing of the records remains.
            StoreError: The store does not accept records. Nothing of the records remains.
            QuotaReached: One of them does not fit into a quota. Nothing of the records remains.
        """
        self.usage.check((plan, row.nbytes) for plan, row, _ in records)
        new: list[tuple[SeriesState, int, Small]] = []
        numbers: dict[int, int] = {}
        for plan, row, data in records:
            series = self._series_of(plan)
            number = numbers.get(series.row.id, series.row.records)
            numbers[series.row.id] = number + 1
            new.append((series, number, Small.of(row, data)))
        self._small.commit(new)
        for (series, number, small), (_, row, _) in zip(new, records, strict=True):
            self._pending.add(series, row, (series.row.id, number, row.moment.attempt, 0, small.row))
            self.usage.note(series)
            self.non_finite.add(row.stats)
            if (number + 1) % series.row.header.geometry.batch == 0:
                self._ripe.add(series.header.path)

    def _series_of(self, plan: Plan) -> SeriesState:
        self._syncing.check()
        if plan.series is None:
            header = self._layout.claim(plan.header, self._key_at)
            identity = self._catalog.add_series(header)
            plan.header = header
            plan.series = SeriesState(SeriesRow(identity, header, 0, 0, False, (), 0, 0))
            self._series[header.path] = plan.series
        return plan.series

    def _key_at(self, path: str) -> Key | None:
        return self._series[path].header.key if path in self._series else None

    def _append(
        self,
        series: SeriesState,
        first: int,
        rows: Sequence[RecordRow | bytes],
        chunks: Iterable[EncodedChunk],
        session: int,
        sequence: int,
    ) -> int:
        """Append records to the shard of record `first`, which is the shard of all of them.

        session, sequence: those of the first record.
        """
        shard = self._shard_for(series, first)
        written = shard.commit(chunks, first, rows, session=session, sequence=sequence)
        series.in_shards = first + len(rows)
        series.row.stored_bytes += written
        self._pending.changed(series)
        if series.is_full:
            self._ripe.add(series.header.path)
        return written

    def _shard_for(self, series: SeriesState, record: int) -> ShardWriter:
        # A set `sealing` mark means that a seal failed half-way. It is finished first.
        if series.is_full or series.row.sealing:
            self._seal_shards([series])
        if series.shard is not None:
            return series.shard
        header = series.header
        number, inside = divmod(record, header.geometry.shard_records)
        path = partial_path(self._layout.spool, header.path, number)
        if inside == 0:
            self._layout.make_room(header, number)
            file_header = msgspec.structs.replace(self._file_header, series=header, shard=number)
            series.shard = ShardWriter.create(path, self._files, file_header)
        else:
            sealed = shard_path(self.path, header, number)
            series.shard = ShardWriter.reopen(
                path, self._files, number, sealed, header.geometry.shard_slots, record, inside
            )
        return series.shard

    def maintain(self) -> None:
        """Move full chunks of small records to shards, and seal full shards.

        This is separate from the commits, so its failures never fail a record. A full shard that cannot be sealed now
        is sealed before the next record of its series.

        Raises:
            OSError: The disk refused.
            StoreError: The store cannot continue.
        """
        if self._syncing.failed:
            return
        for series in self._small.held_back(self._series.values()):
            self._settle(series)
        full: dict[str, SeriesState] = {}
        while self._ripe:
            series = self._series[self._ripe.pop()]
            self._settle(series, full_chunks=True)
            if series.is_full:
                full[series.header.path] = series
        if full:
            self._seal(list(full.values()))

    def _settle(self, series: SeriesState, *, full_chunks: bool = False) -> None:
        """Append the pending small records of a series to its shard, chunk by chunk, until the disk refuses.

        full_chunks: whether the last records stay in the log until they fill a chunk.
        """
        with self._small.moving(series):
            while self._small.has_chunk(series, full=full_chunks):
                first = series.in_shards
                batch = self._small.take_chunk(series, self._joined(series))
                written = self._append(
                    series, first, batch.rows, [batch.chunk], batch.session, batch.sequence
                )
                self._pending.moved(series, first, len(batch.rows), written)
                self._small.moved(series, len(batch.rows))
                self.usage.note(series)

    def _joined(self, series: SeriesState) -> bytes | None:
        """Return the chunk that the next small record of a series joins; None if that record begins a chunk."""
        first, geometry = series.in_shards, series.geometry
        if first % geometry.batch == 0:
            return None
        shard = self._shard_for(series, first)
        place = shard.index.get(geometry.slot(first, 0))
        if place is None:
            raise DamagedRecord(f"the chunk that they continue is lost in {shard.path.name}")
        return shard.read(*place)

    def sync(self) -> None:
        """Make all commits durable if the store is durable. Their acknowledgements wait for this.

        After a failure, the caller must refuse all records since the last sync. The store accepts no further records.

        Raises:
            OSError: The sync failed, and so did a second attempt on new files.
            StoreError: The store does not accept records any more.
        """
        if self._files.durable:
            began = time.monotonic()
            try:
                self._syncing.sync()
            finally:
                self._durations.syncs.add(time.monotonic() - began)
            self._small.release()

    def _open_shards(self) -> list[Path]:
        return [series.shard.path for series in self._series.values() if series.shard is not None]

    # -- catalog and counters -----------------------------------------------------------------------------

    def flush_catalog(self, *, durable: bool = False) -> None:
        """Write the pending rows to the catalog in one transaction.

        Raises:
            StoreError: The catalog cannot be written.
        """
        # After a failed sync only the frames show which records the store holds.
        if not self._syncing.failed:
            self._pending.write(durable=durable)
        self._catalog.publish_if_due()

    def save_session(self, row: SessionRow) -> None:
        """Persist a rank's counters."""
        self.flush_catalog()
        self._catalog.save_session(row)

    def committed(self, client: bytes) -> list[tuple[int, int]]:
        """Return the committed sequence ranges of a client uuid."""
        return self._pending.committed(client)

    def totals(self) -> Held:
        """Return the totals of this node's part of the run. May be called from any thread."""
        return held_by(series.row for series in list(self._series.values()))

    def overhead_nbytes(self) -> int:
        """Return the bytes of logs and catalog, and those that the logs' pending records take in shards, at most.

        A log goes after its records are in shards, so both need their room. May be called from any thread.
        """
        pending = ((series.geometry, len(series.waiting)) for series in list(self._series.values()))
        to_move = sum(geometry.record_nbytes * count for geometry, count in pending)
        return log_and_catalog_nbytes(self._layout.spool) + to_move

    @property
    def unsealed_series(self) -> int:
        """The number of series with records that no sealed shard holds."""
        return sum(s.shard is not None or len(s.waiting) > 0 for s in list(self._series.values()))

    @property
    def unsealed_records(self) -> int:
        """The number of records that plain Zarr readers do not see yet."""
        return sum(series.row.records - series.row.sealed for series in list(self._series.values()))

    @property
    def failed(self) -> bool:
        """Whether the disk lost writes, so that no more records are accepted."""
        return bool(self._syncing.failed)

    @property
    def is_durable(self) -> bool:
        """Whether acknowledgements wait for `sync`."""
        return self._files.durable

    # -- sealing ------------------------------------------------------------------------------------------

    def seal(self, *, is_last: bool = True) -> None:
        """Seal everything. All committed records become visible to plain Zarr readers.

        Args:
            is_last: Whether no rank captures any more. Chunks that later ones replaced then go.

        Raises:
            OSError: The disk refused.
            StoreError: The small records of some series cannot be moved. The message names one of them. The other
                series are sealed.
        """
        # First finish the seals that failed half-way.
        self._seal([series for series in self._series.values() if series.row.sealing], is_last=is_last)
        self._seal(
            [series for series in self._series.values() if series.shard is not None or series.waiting],
            is_last=is_last,
        )
        self._log.rotate()
        stuck = [series for series in self._series.values() if series.waiting]
        if stuck:
            waiting = sum(len(series.waiting) for series in stuck)
            raise StoreError(
                f"{waiting} small records of {len(stuck)} series stay unsealed: {stuck[0].header.path}, …"
            )

    def _seal(self, group: Sequence[SeriesState], *, is_last: bool = False) -> None:
        self._syncing.check()
        for series in group:
            if series.waiting and not (series.is_full or series.row.sealing):
                self._settle(series)
        self._seal_shards(group, is_last=is_last)

    def _seal_shards(self, group: Sequence[SeriesState], *, is_last: bool = False) -> None:
        """Seal the records in shards. Small records in the log are not moved here: moving them calls this."""
        for series in group:
            if series.shard is not None and not series.shard.has_records:
                series.shard.discard()
                series.shard = None
        group = [series for series in group if series.shard is not None]
        if not group:
            return
        began = time.monotonic()
        for series in group:
            series.row.sealing = True
            self._pending.changed(series)
        with self._syncing.doubting():
            self._layout.sync()
            self.flush_catalog(durable=True)
            # The catalog comes before the rename: readers must never miss a shard that left the spool.
            self._catalog.publish()
            try:
                finish_files(self._layout, group, self._files, is_last=is_last)
            except LostWrites as error:
                self._syncing.fail(error)
                raise
            publish(self._layout, self._catalog, group)
        for series in group:
            if series.shard is not None:
                self._pending.compacted(series, series.shard)
            series.shard = None
            series.row.sealing, series.row.sealed = False, series.in_shards
            self._pending.changed(series)
            self.usage.note(series)
        self.flush_catalog()
        self._durations.seals.add(time.monotonic() - began)

    def close(self) -> None:
        """Close files and catalog. The next start recovers the remaining `.partial` files and logs."""
        try:
            if self._syncing.failed:
                self._catalog.distrust()
            else:
                self.sync()
                self.flush_catalog()
                self._log.rotate()
        finally:
            self._small.forget()
            self._files.close()
            try:
                self._catalog.close()
            finally:
                self._layout.close()
