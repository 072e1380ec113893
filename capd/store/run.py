"""One run's store on one node: commits records, seals shards, keeps the catalog. Owned by the append thread.

Order of a commit: frames → catalog row (batched) → the caller acknowledges. Order of a seal: rows → index →
sync → rename → sync directories → attributes → shape → catalog mark; every step can be repeated, and recovery
goes on from whichever was the last (`capd.store.recover`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from capd.errors import StoreError
from capd.store import names
from capd.store.catalog_read import SeriesRow, SessionRow
from capd.store.encode import ChunkResult, as_array, encode_batch, summarise_records
from capd.store.frames import FORMAT_VERSION, Commit, FileHeader, RecordRow, SeriesHeader
from capd.store.geometry import grown, plan_geometry
from capd.store.layout import Layout, shard_path
from capd.store.options import StoreOptions
from capd.store.ranges import RangeSet
from capd.store.recover import Recovered, open_node, partial_path
from capd.store.seal import finish_files, publish
from capd.store.series import Plan, Series
from capd.store.shards import DescriptorCache, EncodedChunk, ShardWriter
from capd.store.small import SmallLog, read_small
from capd_client.dtypes import ITEM_NBYTES
from capd_client.key import Key

__all__ = ["RunStore"]

logger = logging.getLogger(__name__)


class RunStore:
    """Opens (creating or recovering) `<root>/<run_id>.zarr` for one node.

    Raises StoreError (NotAStore for a foreign directory or a newer format). `plan` may be called from any
    thread; everything else belongs to the append thread.
    """

    def __init__(self, root: Path, run_id: str, node: str, options: StoreOptions) -> None:
        self.options = options
        self.path = root / f"{run_id}.zarr"
        self._file_header = FileHeader(FORMAT_VERSION, run_id, node)
        self._layout = Layout(self.path, run_id, node)
        self._files = DescriptorCache(options.open_files, sync=options.durability == "durable")
        found: Recovered = open_node(self._layout, self._files)
        self._catalog = found.catalog
        self._series = {series.header.path: series for series in found.series}
        self._acked = {client: RangeSet(ranges) for client, ranges in found.acked.items()}
        self._log = SmallLog(self._layout.spool, self._file_header, options.log_nbytes, self._files)
        self._plans_lock = threading.Lock()
        self._plans: dict[tuple[Key, str], list[Plan]] = {}
        self._new_rows: list[tuple[int, int, RecordRow, int]] = list(found.rows)
        self._changed: set[str] = set()
        self._changed_clients: set[bytes] = set(found.changed_clients)
        self._stuck: set[str] = set()  # series whose small records could not be moved; said once
        self._ripe: set[str] = set()  # series with a full chunk in the log, or a full shard
        self._adopt(found)

    def _adopt(self, found: Recovered) -> None:
        for series in found.series:
            header = series.header
            self._plans.setdefault((header.key, header.dtype), []).append(Plan(header, series))
            self._changed.add(header.path)
            for place in series.waiting:
                self._log.adopt(place.log)
        self.flush_catalog()
        self._seal(found.unfinished)

    # -- planning -----------------------------------------------------------------------------------------

    def plan(self, key: Key, dtype: str, attributes: dict[str, object], shape: tuple[int, ...]) -> Plan:
        """How a record of this key, dtype and shape is encoded; the same shape always gives the same plan."""
        with self._plans_lock:
            plans = self._plans.setdefault((key, dtype), [])
            for plan in plans:
                if plan.geometry.fits(shape):
                    return plan
            extents = shape
            for plan in plans:
                if len(plan.geometry.extents) == len(shape):
                    extents = tuple(map(max, extents, grown(plan.geometry.extents, shape)))
            geometry = plan_geometry(extents, ITEM_NBYTES[dtype], self.options.shard_nbytes)
            header = SeriesHeader(
                names.series_path(key), key, dtype, self.options.codec, geometry, attributes
            )
            plan = Plan(header)
            plans.append(plan)
            return plan

    # -- commits ------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, row: RecordRow, chunks: Iterable[ChunkResult]) -> None:
        """Commit a large record whose chunks are encoded. Raises OSError or StoreError; then nothing of it remains."""
        series = self._series_of(plan)
        geometry = series.geometry
        number = series.row.records
        encoded = (
            EncodedChunk(geometry.slot(number, c.ordinal), c.ordinal, c.payload, c.raw_nbytes) for c in chunks
        )
        written = self._append(series, number, [row], encoded)
        series.count(row)
        self._note(series, number, row, written)

    def commit_small(self, plan: Plan, row: RecordRow, data: memoryview | bytes) -> None:
        """Commit a small record to the node's log. Raises OSError; then nothing of it remains."""
        series = self._series_of(plan)
        number = series.row.records
        series.waiting.append(self._log.append(series.header, data, number, row))
        series.count(row)
        self._note(series, number, row, 0)
        if series.row.records % series.geometry.batch == 0:
            self._ripe.add(series.header.path)

    def _series_of(self, plan: Plan) -> Series:
        if plan.series is None:
            header = self._layout.claim(plan.header, self._series)
            identity = self._catalog.add_series(header)
            plan.header = header
            plan.series = Series(SeriesRow(identity, header, 0, 0, False, (), 0, 0))
            self._series[header.path] = plan.series
        return plan.series

    def _note(self, series: Series, number: int, row: RecordRow, stored_nbytes: int) -> None:
        self._new_rows.append((series.row.id, number, row, stored_nbytes))
        self._changed.add(series.header.path)
        self._acked.setdefault(row.client, RangeSet()).add(row.sequence)
        self._changed_clients.add(row.client)

    def _append(
        self, series: Series, first: int, rows: list[RecordRow], chunks: Iterable[EncodedChunk]
    ) -> int:
        """Append records to the shard that record `first` belongs to; all of them lie in it."""
        shard = self._shard_for(series, first)
        session = int.from_bytes(rows[0].client[:8], "little")
        written = shard.commit(chunks, Commit(first, rows), session=session, sequence=rows[0].sequence)
        series.in_shards = first + len(rows)
        series.row.stored_bytes += written
        if series.is_full:
            self._ripe.add(series.header.path)
        return written

    def _shard_for(self, series: Series, record: int) -> ShardWriter:
        if series.is_full or series.row.sealing:  # sealing: an attempt that failed half-way comes first
            self._seal([series])
        if series.shard is not None:
            return series.shard
        header = series.header
        number, inside = divmod(record, header.geometry.shard_records)
        path = partial_path(self._layout.spool, header.path, number)
        if inside == 0:
            file_header = msgspec.structs.replace(self._file_header, series=header, shard=number)
            series.shard = ShardWriter.create(path, self._files, file_header)
        else:
            sealed = shard_path(self.path, header, number)
            series.shard = ShardWriter.reopen(path, self._files, number, sealed, header.geometry.shard_slots)
        return series.shard

    # -- small records into shards ------------------------------------------------------------------------

    def _settle(self, series: Series) -> None:
        """Move the waiting small records of a series into its shard, chunk by chunk.

        They are acknowledged already: if the disk refuses, or one of them is damaged, they stay in the log,
        readable from there, and the next call tries again.
        """
        batch = series.geometry.batch
        try:
            while series.waiting:
                first = series.in_shards
                self._settle_batch(series, first, series.waiting[: batch - first % batch])
        except (OSError, StoreError) as error:
            if series.header.path not in self._stuck:
                self._stuck.add(series.header.path)
                waiting = len(series.waiting)
                logger.warning("%s: %d small records stay in the log: %s", series.header.path, waiting, error)
        else:
            self._stuck.discard(series.header.path)

    def _settle_batch(self, series: Series, first: int, places: Sequence[tuple[int, int]]) -> None:
        geometry, chain = series.geometry, series.chain
        records, rows = [], []
        for log, offset in places:
            raw, commit, _ = read_small(self._files.get(self._log.path(log)), offset)
            rows.append(commit.rows[0])
            records.append(as_array(raw, chain.stored, rows[-1].shape))
        if self.options.statistics:
            for row, stats in zip(rows, summarise_records(records, series.header.dtype), strict=True):
                row.stats = stats
        slot = geometry.slot(first, 0)
        at = first % geometry.batch
        held = None
        if at:
            shard = self._shard_for(series, first)
            offset, nbytes = shard.index[slot]
            held = chain.decode(shard.read(offset, nbytes), (geometry.batch, *geometry.chunk))
        payload = encode_batch(records, at, held, geometry, chain)
        raw_nbytes = sum(row.nbytes for row in rows)
        written = self._append(series, first, rows, [EncodedChunk(slot, 0, payload, raw_nbytes)])
        for number, row in enumerate(rows, first):
            self._new_rows.append((series.row.id, number, row, written // len(rows)))
        self._changed.add(series.header.path)
        del series.waiting[: len(places)]
        for log, _ in places:
            self._log.release(log)

    def maintain(self) -> None:
        """Work that commits leave behind: full chunks of small records into shards, full shards sealed.

        Apart from the commits, so that its failures never fail a record. Raises OSError or StoreError; a full
        shard that could not be sealed is sealed before the next record of its series.
        """
        while self._ripe:
            series = self._series[self._ripe.pop()]
            if len(series.waiting) >= series.geometry.batch - series.in_shards % series.geometry.batch:
                self._settle(series)
            if series.is_full:
                self._seal([series])
        if (oldest := self._log.oldest) is not None:
            for series in self._series.values():
                if series.waiting and series.waiting[0].log == oldest:
                    self._settle(series)

    # -- catalog and counters -----------------------------------------------------------------------------

    def flush_catalog(self, *, durable: bool = False) -> None:
        """Write the rows that gathered since the last call, in one transaction. Raises StoreError."""
        if not (self._new_rows or self._changed or self._changed_clients):
            return
        self._catalog.write(
            self._new_rows,
            [self._series[path].row for path in self._changed],
            {client: self._acked[client].ranges() for client in self._changed_clients},
            durable=durable,
        )
        self._new_rows = []
        self._changed.clear()
        self._changed_clients.clear()

    def save_session(self, row: SessionRow) -> None:
        """Persist a rank's counters."""
        self.flush_catalog()
        self._catalog.save_session(row)

    def committed(self, client: bytes) -> list[tuple[int, int]]:
        """Committed sequence ranges of a client uuid."""
        return self._acked[client].ranges() if client in self._acked else []

    def totals(self) -> tuple[int, int, int]:
        """(records, raw bytes, stored bytes) of this node's part of the run."""
        rows = [series.row for series in list(self._series.values())]
        return sum(r.records for r in rows), sum(r.raw_bytes for r in rows), sum(r.stored_bytes for r in rows)

    # -- sealing ------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Seal everything: all committed records become visible to plain Zarr readers.

        Raises OSError, or StoreError naming a series whose small records could not be moved; the others are
        sealed then.
        """
        self._seal([series for series in self._series.values() if series.shard is not None or series.waiting])
        self._log.rotate()
        stuck = [series for series in self._series.values() if series.waiting]
        if stuck:
            waiting = sum(len(series.waiting) for series in stuck)
            raise StoreError(
                f"{waiting} small records of {len(stuck)} series stay unsealed: {stuck[0].header.path}, …"
            )

    def _seal(self, group: Sequence[Series]) -> None:
        for series in group:
            if series.waiting and not series.is_full:
                self._settle(series)
        for series in group:
            if series.shard is not None and not series.shard.has_records:
                series.shard.discard()
                series.shard = None
        group = [series for series in group if series.shard is not None]
        if not group:
            return
        for series in group:
            series.row.sealing = True
            self._changed.add(series.header.path)
        self.flush_catalog(durable=True)
        finish_files(self._layout, group)
        publish(self._layout, self._catalog, group)
        for series in group:
            series.shard = None
            series.row.sealing, series.row.sealed = False, series.in_shards
            self._changed.add(series.header.path)
        self.flush_catalog()

    def close(self) -> None:
        """Close files and catalog; `.partial` files and logs that are left are taken up by the next start."""
        self.flush_catalog()
        self._log.rotate()
        self._files.close()
        self._catalog.close()
