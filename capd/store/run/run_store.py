"""One run's store on one node: commits records, seals shards, keeps the catalog. Owned by the append thread.

Order of a commit: frames → catalog row (batched) → the caller acknowledges; in a durable store the group sync
comes before the acknowledgement. Order of a seal: rows → index → sync → rename → sync directories → attributes →
shape → catalog mark; every step can be repeated, and recovery goes on from whichever was the last
(`capd.store.recover.open_node`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import SeriesRow, SessionRow
from capd.store.catalog.totals import Held, beside_nbytes, held_by
from capd.store.catalog.writer import new_row
from capd.store.disk.layout import Layout, partial_path, shard_path
from capd.store.disk.open_files import LostWrites, OpenFiles
from capd.store.disk.syncing import Syncing
from capd.store.format.encode import ChunkResult
from capd.store.format.frames import FORMAT_VERSION, FileHeader, RecordRow, session_of
from capd.store.format.log_places import LOG_GLOB
from capd.store.recover.open_node import Recovered, open_node
from capd.store.run.options import StoreOptions
from capd.store.run.pending_rows import PendingRows
from capd.store.run.planner import Planner
from capd.store.run.small_records import Room, SmallRecords
from capd.store.shards.seal import finish_files, publish
from capd.store.shards.series import Plan, SeriesState
from capd.store.shards.small_log import Small, SmallLog
from capd.store.shards.writer import EncodedChunk, ShardWriter
from capd_client.protocol.key import Key

__all__ = ["RunStore"]


class RunStore:
    """Opens (creating or recovering) `<root>/<run_id>.zarr` for one node.

    Raises StoreError (NotAStore for a foreign directory or a newer format). `plan` may be called from any
    thread; everything else belongs to the append thread.
    """

    def __init__(
        self, root: Path, run_id: str, node: str, options: StoreOptions, room: Room | None = None
    ) -> None:
        """room: for small records on their way to a shard; of its own if None."""
        self.options = options
        self.path = root / f"{run_id}.zarr"
        self._file_header = FileHeader(FORMAT_VERSION, run_id, node)
        self._layout = Layout(self.path, run_id, node)
        self._files = OpenFiles(options.open_files, durable=options.durability == "durable")
        self._syncing = Syncing(self._layout, self._files, self._open_shards)
        found: Recovered = open_node(self._layout, self._files)
        self._catalog = found.catalog
        self._series = {series.header.path: series for series in found.series}
        self._gathered = PendingRows(found)
        self.plan = Planner(options, found.series).plan
        log = SmallLog(self._layout.spool, self._file_header, options.log_nbytes, self._files)
        self._small = SmallRecords(log, self._files, room or Room())
        self._ripe: set[str] = set()  # series with a full chunk in the log, or a full shard
        self._adopt(found)

    def _adopt(self, found: Recovered) -> None:
        for series in found.series:
            self._gathered.changed(series)
            self._small.adopt(series)
        for pattern in ("*.partial", LOG_GLOB):  # a killed daemon may have written what it had not synced yet
            for path in self._layout.spool.glob(pattern):
                self._files.adopted(path, path.stat().st_size)
        self.sync()
        self.flush_catalog()
        self._seal(found.unfinished)

    @property
    def spool(self) -> Path:
        """Where files lie that are not in the store yet."""
        return self._layout.spool

    # -- commits ------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, row: RecordRow, chunks: Iterable[ChunkResult]) -> None:
        """Commit a large record whose chunks are encoded. Raises OSError or StoreError; then nothing of it remains."""
        series = self._series_of(plan)
        geometry = series.geometry
        number = series.row.records
        encoded = (
            EncodedChunk(geometry.slot(number, c.ordinal), c.ordinal, c.encoded, c.raw_nbytes) for c in chunks
        )
        written = self._append(series, number, [row], encoded, session_of(row.client), row.sequence)
        self._gathered.add(series, row, new_row(series.row.id, number, row, written))

    def commit_small(self, records: Sequence[tuple[Plan, RecordRow, bytes]]) -> None:
        """Commit small records to the node's log, in one write. Raises OSError or StoreError; then nothing of them
        remains."""
        new: list[tuple[SeriesState, int, Small]] = []
        numbers: dict[int, int] = {}
        for plan, row, data in records:
            series = self._series_of(plan)
            number = numbers.get(series.row.id, series.row.records)
            numbers[series.row.id] = number + 1
            new.append((series, number, Small.of(row, data)))
        self._small.commit(new)
        for (series, number, small), (_, row, _) in zip(new, records, strict=True):
            self._gathered.add(series, row, (series.row.id, number, row.moment.attempt, 0, small.row))
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
        """Append records to the shard that record `first` belongs to; all of them lie in it. session, sequence: of
        the first."""
        shard = self._shard_for(series, first)
        written = shard.commit(chunks, first, rows, session=session, sequence=sequence)
        series.in_shards = first + len(rows)
        series.row.stored_bytes += written
        self._gathered.changed(series)
        if series.is_full:
            self._ripe.add(series.header.path)
        return written

    def _shard_for(self, series: SeriesState, record: int) -> ShardWriter:
        if series.is_full or series.row.sealing:  # sealing: an attempt that failed half-way comes first
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
                path, self._files, number, sealed, header.geometry.shard_slots, record
            )
        return series.shard

    def maintain(self) -> None:
        """Work that commits leave behind: full chunks of small records into shards, full shards sealed.

        Apart from the commits, so that its failures never fail a record. Raises OSError or StoreError; a full
        shard that could not be sealed is sealed before the next record of its series.
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
        """Append the waiting small records of a series to its shard, chunk by chunk, as far as the disk allows it.

        full_chunks: leave the last ones in the log until they fill a chunk.
        """
        with self._small.moving(series):
            while self._small.has_chunk(series, full=full_chunks):
                first = series.in_shards
                batch = self._small.take_chunk(series, self._joined(series))
                written = self._append(
                    series, first, batch.rows, [batch.chunk], batch.session, batch.sequence
                )
                self._gathered.moved(series, first, len(batch.rows), written)
                self._small.moved(series, len(batch.rows))

    def _joined(self, series: SeriesState) -> bytes | None:
        """The chunk that the next small record of a series joins; None if it begins one. Raises DamagedRecord."""
        first, geometry = series.in_shards, series.geometry
        if first % geometry.batch == 0:
            return None
        shard = self._shard_for(series, first)
        place = shard.index.get(geometry.slot(first, 0))
        if place is None:
            raise DamagedRecord(f"the chunk that they join is lost in {shard.path.name}")
        return shard.read(*place)

    def sync(self) -> None:
        """In a durable store: make everything that was committed durable; its acknowledgements wait for this.

        Raises OSError or StoreError when that failed, on new files, too. What was committed since the last sync
        must be refused then, and the store takes nothing any more.
        """
        if self._files.durable:
            self._syncing.sync()
            self._small.release()

    def _open_shards(self) -> list[Path]:
        return [series.shard.path for series in self._series.values() if series.shard is not None]

    # -- catalog and counters -----------------------------------------------------------------------------

    def flush_catalog(self, *, durable: bool = False) -> None:
        """Write the rows that gathered since the last call, in one transaction. Raises StoreError."""
        if not self._syncing.failed:  # else only the frames can tell what it holds
            self._gathered.write(durable=durable)
        self._catalog.publish_if_due()

    def save_session(self, row: SessionRow) -> None:
        """Persist a rank's counters."""
        self.flush_catalog()
        self._catalog.save_session(row)

    def committed(self, client: bytes) -> list[tuple[int, int]]:
        """Committed sequence ranges of a client uuid."""
        return self._gathered.committed(client)

    def totals(self) -> Held:
        """What this node's part of the run holds. Called from any thread."""
        return held_by(series.row for series in list(self._series.values()))

    def beside_nbytes(self) -> int:
        """Bytes of the files that the run has beside its shards: small-record logs and the catalog."""
        return beside_nbytes(self._layout.spool)

    @property
    def unsealed_series(self) -> int:
        """How many series have records that no sealed shard holds."""
        return sum(s.shard is not None or len(s.waiting) > 0 for s in list(self._series.values()))

    @property
    def unsealed_records(self) -> int:
        """How many records plain Zarr readers do not see yet."""
        return sum(series.row.records - series.row.sealed for series in list(self._series.values()))

    @property
    def is_durable(self) -> bool:
        """Whether acknowledgements wait for `sync`."""
        return self._files.durable

    # -- sealing ------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Seal everything: all committed records become visible to plain Zarr readers.

        Raises OSError, or StoreError naming a series whose small records could not be moved; the others are
        sealed then.
        """
        self._seal([series for series in self._series.values() if series.row.sealing])  # left by a failure
        self._seal([series for series in self._series.values() if series.shard is not None or series.waiting])
        self._small.rotate()
        stuck = [series for series in self._series.values() if series.waiting]
        if stuck:
            waiting = sum(len(series.waiting) for series in stuck)
            raise StoreError(
                f"{waiting} small records of {len(stuck)} series stay unsealed: {stuck[0].header.path}, …"
            )

    def _seal(self, group: Sequence[SeriesState]) -> None:
        self._syncing.check()
        for series in group:
            if series.waiting and not (series.is_full or series.row.sealing):
                self._settle(series)
        self._seal_shards(group)

    def _seal_shards(self, group: Sequence[SeriesState]) -> None:
        """Seal what stands in shards; settling needs this itself, so it settles nothing."""
        for series in group:
            if series.shard is not None and not series.shard.has_records:
                series.shard.discard()
                series.shard = None
        group = [series for series in group if series.shard is not None]
        if not group:
            return
        for series in group:
            series.row.sealing = True
            self._gathered.changed(series)
        with self._syncing.doubting():
            self._layout.sync()
            self.flush_catalog(durable=True)
            self._catalog.publish()  # before a shard leaves the spool, where readers would miss it
            try:
                finish_files(self._layout, group, self._files)
            except LostWrites as error:
                self._syncing.fail(error)
                raise
            publish(self._layout, self._catalog, group)
        for series in group:
            series.shard = None
            series.row.sealing, series.row.sealed = False, series.in_shards
            self._gathered.changed(series)
        self.flush_catalog()

    def close(self) -> None:
        """Close files and catalog; `.partial` files and logs that are left are taken up by the next start."""
        try:
            if self._syncing.failed:
                self._catalog.distrust()
            else:
                self.sync()
                self.flush_catalog()
                self._small.rotate()
        finally:
            self._small.forget()
            self._files.close()
            self._catalog.close()
