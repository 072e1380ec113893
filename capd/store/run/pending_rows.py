"""The pending rows of a run store: committed, but not yet in the catalog, with totals and acknowledged ranges."""

from __future__ import annotations

from capd.store.catalog.rows import SeriesRow
from capd.store.catalog.writer import Catalog, NewRow
from capd.store.disk.failpoints import failpoint
from capd.store.format.frames import RecordRow
from capd.store.format.ranges import RangeSet
from capd.store.recover.state import Recovered
from capd.store.shards.series import SeriesState
from capd.store.shards.writer import ShardWriter

__all__ = ["PendingRows"]


class PendingRows:
    """The changes that the next catalog transaction writes. Owned by the append thread."""

    def __init__(self, found: Recovered) -> None:
        self._catalog: Catalog = found.catalog
        self._rows: list[NewRow] = list(found.rows)
        self._moved: list[tuple[int, int, int, int]] = []
        self._changed: dict[int, SeriesRow] = {}
        self._acked = {client: RangeSet(ranges) for client, ranges in found.acked.items()}
        self._clients: set[bytes] = set(found.changed_clients)

    def committed(self, client: bytes) -> list[tuple[int, int]]:
        """Return the committed sequence ranges of a client uuid."""
        return self._acked[client].ranges() if client in self._acked else []

    def add(self, series: SeriesState, row: RecordRow, new: NewRow) -> None:
        """Add a committed record. new: its row for the catalog."""
        series.count(row)
        self._rows.append(new)
        self._changed[series.row.id] = series.row
        client = row.client
        if client not in self._clients:
            self._clients.add(client)
            self._acked.setdefault(client, RangeSet())
        self._acked[client].add(row.sequence)

    def moved(self, series: SeriesState, first: int, count: int, stored_nbytes: int) -> None:
        """Note that small records moved to a shard. stored_nbytes: the sum over all of them."""
        self._moved.append((series.row.id, first, first + count, stored_nbytes // count))

    def compacted(self, series: SeriesState, shard: ShardWriter) -> None:
        """Note that a shard was sealed without some chunks, and which bytes its records take now.

        The rows of the records are in the catalog.

        Raises:
            StoreError: The catalog cannot be read.
        """
        for kept in shard.kept:
            known = self._catalog.stored(series.row.id, kept.first, kept.first + kept.records)
            before, after = sum(nbytes for _, _, nbytes in known.values()), kept.nbytes
            # The catalog has whole shares of the bytes, unless a recovery has counted the records.
            if before <= kept.before < before + kept.records:
                before = kept.before
            else:
                after -= after % kept.records
            series.row.stored_bytes = max(0, series.row.stored_bytes - before + after)
            self.moved(series, kept.first, kept.records, kept.nbytes)

    def changed(self, series: SeriesState) -> None:
        """Note that the totals or marks of a series changed."""
        self._changed[series.row.id] = series.row

    def write(self, *, durable: bool) -> None:
        """Update the catalog in one transaction.

        Raises:
            StoreError: The catalog cannot be written. All rows stay pending.
        """
        if not (self._rows or self._changed or self._clients):
            return
        failpoint("catalog.before_write")
        acked = {client: self._acked[client].ranges() for client in self._clients}
        self._catalog.write(self._rows, self._changed.values(), acked, self._moved, durable=durable)
        failpoint("catalog.after_write")
        self._rows, self._moved = [], []
        self._changed.clear()
        self._clients.clear()
