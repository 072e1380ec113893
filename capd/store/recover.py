"""Opens one node's part of a run after any end of the daemon before: catalog, spool and shards made consistent.

The catalog may lag behind the frames by what was not yet written in a batch, so `.partial` files and small
logs are replayed; a missing or damaged catalog is rebuilt from all frames. A `.partial` is cut behind its
last COMMIT. A seal that was interrupted between rename and catalog mark is published again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from capd.errors import StoreError
from capd.store.catalog import Catalog
from capd.store.catalog_read import CATALOG_NAME, SeriesRow
from capd.store.files import make_directory
from capd.store.frames import RecordRow, SeriesHeader
from capd.store.layout import Layout, node_directory, read_group, shard_path
from capd.store.ranges import RangeSet
from capd.store.scan import ScannedShard, scan_log, scan_shard
from capd.store.seal import publish
from capd.store.series import Series
from capd.store.shards import DescriptorCache, ShardWriter
from capd.store.small import LOG_GLOB

__all__ = ["Recovered", "open_node", "partial_path"]

logger = logging.getLogger(__name__)


def partial_path(spool: Path, series_path: str, shard: int) -> Path:
    """Where an unsealed shard lies."""
    return spool / f"{hashlib.blake2b(series_path.encode(), digest_size=10).hexdigest()}-{shard:08d}.partial"


@dataclass(slots=True)
class Recovered:
    """What stood on disk. rows: records that the catalog lacks. unfinished: series to seal at once."""

    catalog: Catalog
    series: list[Series]
    acked: dict[bytes, list[tuple[int, int]]]
    rows: list[tuple[int, int, RecordRow, int]] = field(default_factory=list)
    changed_clients: set[bytes] = field(default_factory=set)
    unfinished: list[Series] = field(default_factory=list)


class _Node:
    def __init__(self, layout: Layout, files: DescriptorCache, catalog: Catalog) -> None:
        self.layout, self.files, self.catalog = layout, files, catalog
        fresh = not self.catalog.is_complete
        if fresh:
            self.catalog.clear()  # a rebuild that was interrupted begins again
        self.series = {row.header.path: Series(row, in_shards=row.sealed) for row in self.catalog.series()}
        self.known = {path: series.row.records for path, series in self.series.items()}
        self.acked = {client: RangeSet(ranges) for client, ranges in self.catalog.acked().items()}
        self.out = Recovered(self.catalog, [], {})
        if fresh:
            self._read_sealed()

    def _series_of(self, header: SeriesHeader) -> Series:
        series = self.series.get(header.path)
        if series is None:
            row = SeriesRow(self.catalog.add_series(header), header, 0, 0, False, (), 0, 0)
            series = self.series[header.path] = Series(row)
        return series

    def _add(self, series: Series, number: int, row: RecordRow, stored_nbytes: int) -> None:
        if number >= self.known.get(series.header.path, 0):
            if number >= series.row.records:
                series.row.records = number  # `count` makes it number + 1
                series.count(row)
                series.row.stored_bytes += stored_nbytes
            self.out.rows.append((series.row.id, number, row, stored_nbytes))
        elif row.stats is not None:
            self.out.rows.append((series.row.id, number, row, stored_nbytes))
        ranges = self.acked.setdefault(row.client, RangeSet())
        if row.sequence not in ranges:
            ranges.add(row.sequence)
        self.out.changed_clients.add(row.client)

    def _add_shard(self, scanned: ScannedShard) -> Series:
        series = self._series_of(scanned.header)
        share = scanned.end // max(1, len(scanned.rows))
        for number, row in sorted(scanned.rows.items()):
            self._add(series, number, row, share)
        return series

    def _read_sealed(self) -> None:
        """The catalog is new: read every sealed shard of this node."""
        for path in sorted(self.layout.run.glob("*/rank*/layer*/*/*/data/c")):
            group = read_group(path.parent.parent) or {}
            if group.get("attributes", {}).get("capd", {}).get("node") != self.layout.node:
                continue
            files = (p for p in path.rglob("*") if p.is_file())
            for shard in sorted(files, key=lambda p: int(p.relative_to(path).parts[0])):
                if (scanned := scan_shard(shard)) is not None and scanned.rows:
                    series = self._add_shard(scanned)
                    series.in_shards = max(series.in_shards, max(scanned.rows) + 1)
        for series in self.series.values():
            series.row.sealed = series.in_shards
            series.row.sealing = True  # its shape may not be published yet

    def read_partials(self) -> None:
        for path in sorted(self.layout.spool.glob("*.partial")):
            scanned = scan_shard(path)
            if scanned is None:
                _set_aside(path, "it does not begin with a sound header")
                continue
            series = self._series_of(scanned.header)
            newest = max(scanned.rows, default=-1)
            if newest < series.row.sealed:
                path.unlink()  # a fresh file without records, or a copy of a sealed shard that got no new ones
                continue
            os.truncate(path, scanned.end)
            self._add_shard(scanned)
            series.in_shards = newest + 1
            series.shard = ShardWriter(
                path,
                self.files,
                scanned.shard,
                scanned.end,
                scanned.index,
                has_records=True,
                replaces=shard_path(self.layout.run, scanned.header, scanned.shard).exists(),
            )
            series.row.sealing = False
            if series.is_full:
                self.out.unfinished.append(series)

    def read_logs(self) -> None:
        """Small records that stand in no shard. Where damage took one, the later ones close ranks."""
        for path in sorted(self.layout.spool.glob(LOG_GLOB)):
            used = False
            logged_records = scan_log(path)
            if logged_records is None:
                _set_aside(path, "it does not begin with a sound header")
                continue
            for logged in logged_records:
                series = self._series_of(logged.header)
                if logged.record < series.in_shards:
                    continue
                self._add(series, series.in_shards + len(series.waiting), logged.row, 0)
                series.waiting.append(logged.place)
                used = True
            if not used:
                path.unlink()

    def reconcile(self) -> None:
        """Forget catalog rows of records that no file holds any more; what is lost is said, not pretended."""
        for series in self.series.values():
            held = series.in_shards + len(series.waiting)
            if series.row.records > held:
                lost = series.row.records - held
                logger.warning(
                    "%s: %d records of the catalog are in no file any more", series.header.path, lost
                )
                self.catalog.forget_from(series.row, held)

    def finish_seals(self) -> None:
        """Renamed shards whose shape was not published: publish them now."""
        for series in self.series.values():
            if not series.row.sealing:
                continue
            series.row.sealing = False
            series.row.sealed = series.in_shards = _records_on_disk(self.layout.run, series)
            publish(self.layout, self.catalog, [series])


def _records_on_disk(run: Path, series: Series) -> int:
    """Sealed records, from the newest shard file's own journal."""
    per_shard = series.geometry.shard_records
    for shard in range((series.row.records - 1) // per_shard, -1, -1):
        path = shard_path(run, series.header, shard)
        if path.exists() and (scanned := scan_shard(path)) is not None and scanned.rows:
            return max(scanned.rows) + 1
    return 0


def open_node(layout: Layout, files: DescriptorCache) -> Recovered:
    """Bring one node's part of the run to a consistent state; raises StoreError if the disk does not allow it."""
    catalog = node_directory(layout.run, layout.node) / CATALOG_NAME
    try:
        try:
            return _open(layout, files)
        except sqlite3.DatabaseError as error:  # damaged; what merely passes is a StoreError already
            logger.warning("%s is damaged (%s): rebuilding it from the shard files", catalog, error)
            _set_aside(catalog, str(error))
            for suffix in ("-wal", "-shm"):
                catalog.with_name(catalog.name + suffix).unlink(missing_ok=True)
            return _open(layout, files)
    except (OSError, sqlite3.DatabaseError) as error:
        raise StoreError(
            f"cannot recover {layout.run}: {error}; check the disk, then start `capd serve` again"
        ) from error


def _open(layout: Layout, files: DescriptorCache) -> Recovered:
    catalog = Catalog(node_directory(layout.run, layout.node) / CATALOG_NAME)
    try:
        node = _Node(layout, files, catalog)
        _clear_leftovers(layout.spool)
        node.read_partials()
        catalog.write(node.out.rows, (), {})
        node.out.rows.clear()
        node.finish_seals()
        node.read_logs()
        node.reconcile()
        acked = {client: ranges.ranges() for client, ranges in node.acked.items()}
        rows = [series.row for series in node.series.values()]
        catalog.write(node.out.rows, rows, acked, durable=True)
        node.out.rows.clear()
        catalog.mark_complete()
    except BaseException:
        catalog.abandon()
        raise
    node.out.series = list(node.series.values())
    node.out.acked = acked
    return node.out


def _set_aside(path: Path, reason: str) -> None:
    quarantine = (
        path.parent / "quarantine" if path.parent.name != "spool" else path.parent.parent / "quarantine"
    )
    make_directory(quarantine)
    logger.warning("%s moved to %s: %s", path, quarantine, reason)
    os.replace(path, quarantine / path.name)


def _clear_leftovers(spool: Path) -> None:
    for path in spool.glob("*.tmp"):
        path.unlink()
    for path in spool.glob("*.new"):
        shutil.rmtree(path, ignore_errors=True)
