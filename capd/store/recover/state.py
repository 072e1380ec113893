"""The state of one node's part of a run while its files are read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from capd.store.catalog.rows import SeriesRow
from capd.store.catalog.writer import Catalog, NewRow, new_row
from capd.store.disk import power
from capd.store.disk.layout import Layout, node_directory
from capd.store.disk.open_files import OpenFiles
from capd.store.documents.zarr_json import run_attributes, run_ids
from capd.store.format.frames import FORMAT_VERSION, UNKNOWN_CLIENT, FileHeader, RecordRow, SeriesHeader
from capd.store.format.ranges import RangeSet
from capd.store.shards.series import SeriesState
from capd_client.protocol.key import Moment

__all__ = ["Recovered", "Recovery"]


@dataclass(slots=True)
class Recovered:
    """The result of a recovery. rows: records that the catalog lacks. unfinished: series to seal at once."""

    catalog: Catalog
    series: list[SeriesState]
    acked: dict[bytes, list[tuple[int, int]]]
    rows: list[NewRow] = field(default_factory=list)
    changed_clients: set[bytes] = field(default_factory=set)
    unfinished: list[SeriesState] = field(default_factory=list)


class Recovery:
    """The state of one node during its recovery.

    Attributes:
        known: The number of records that the catalog had, by series.
        in_shards: The numbers of small records in shards, by series and (client, sequence). They are used where the
            number in a log does not show whether the record is in a shard.
        may_be_torn: The power may have failed, so COMMITs can be on disk without their chunks.
        nameless: The moments and shapes of small records whose capture is lost, by series. They are set only if the
            sealed shards were read back. Numbers in logs may then be older than a loss, and prove nothing.
        in_logs: The captures of the records that are pending in logs.
    """

    def __init__(
        self,
        layout: Layout,
        files: OpenFiles,
        catalog: Catalog,
        headers: Mapping[str, SeriesHeader],
    ) -> None:
        """Read the catalog's series and acknowledged ranges.

        headers: the headers of series by path, for series that no file describes.
        """
        self.layout, self.files, self.catalog = layout, files, catalog
        self.run_id = str(run_attributes(layout.run).get("run_id", layout.run.stem))
        # The two differ if somebody renamed the run.
        self._run_ids = run_ids(layout.run)
        self.quarantine = node_directory(layout.run, layout.node) / "quarantine"
        self.file_header = FileHeader(FORMAT_VERSION, self.run_id, layout.node)
        # If the catalog is incomplete, everything is read from the frames.
        self.fresh = not catalog.is_complete
        self.headers = headers
        if self.fresh:
            self.headers = {**headers, **{row.header.path: row.header for row in catalog.series()}}
            # An interrupted rebuild starts again.
            catalog.clear()
        self.series = {row.header.path: SeriesState(row, in_shards=row.sealed) for row in catalog.series()}
        self.known = {path: series.row.records for path, series in self.series.items()}
        self.acked = {client: RangeSet(ranges) for client, ranges in catalog.acked().items()}
        self.mounted = power.mount_of(layout.run)
        self.may_be_torn = not self.mounted or catalog.mounted != self.mounted
        # True once rows of the catalog were removed: it no longer shows what was committed.
        self.lost = False
        self.in_shards: dict[str, dict[tuple[bytes, int], int]] = {}
        self.nameless: dict[str, set[tuple[Moment, tuple[int, ...]]]] = {}
        self.in_logs: set[tuple[bytes, int]] = set()
        self.out = Recovered(catalog, [], {})

    def foreign(self, file: FileHeader | None) -> str:
        """Return how a file's HEADER names another run or node, or ""."""
        return "" if file is None else file.foreign(self._run_ids, self.layout.node)

    def series_of(self, header: SeriesHeader) -> SeriesState:
        """Return the series of a header found in a file. A new series is added to the catalog."""
        series = self.series.get(header.path)
        if series is None:
            row = SeriesRow(self.catalog.add_series(header), header, 0, 0, False, (), 0, 0)
            series = self.series[header.path] = SeriesState(row)
        return series

    def add(self, series: SeriesState, number: int, row: RecordRow, stored_nbytes: int) -> None:
        """Add a record that the catalog lacks or knows only in part."""
        if number >= series.row.records:
            # `count` makes it number + 1.
            series.row.records = number
            series.count(row)
        self.out.rows.append(new_row(series.row.id, number, row, stored_nbytes))
        self.acknowledge(row)

    def agree(self, series: SeriesState, rows: Mapping[int, RecordRow]) -> dict[int, int]:
        """Remove the catalog's rows from the first one that contradicts the files.

        Rows contradict the files if a kill followed the rewriting of a damaged file with new numbers.

        Returns:
            The stored bytes of the rows that the catalog keeps, by number.
        """
        first, end = min(rows, default=0), max(rows, default=-1) + 1
        if self.known.get(series.header.path, 0) <= first:
            return {}
        found = self.catalog.stored(series.row.id, first, end)
        wrong = [n for n, (client, sequence, _) in found.items() if not _same(rows.get(n), client, sequence)]
        if wrong:
            self.catalog.forget_from(series.row, min(wrong))
            self.lost = True
            self.known[series.header.path] = min(wrong)
        return {n: stored for n, (_, _, stored) in found.items() if not wrong or n < min(wrong)}

    def acknowledge(self, row: RecordRow) -> None:
        """Count the record's sequence as committed."""
        if row.client == UNKNOWN_CLIENT:
            return
        ranges = self.acked.setdefault(row.client, RangeSet())
        if row.sequence not in ranges:
            ranges.add(row.sequence)
        self.out.changed_clients.add(row.client)

    def acknowledge_what_is_there(self) -> None:
        """Count exactly the records with a row as committed. Clients send the rest again."""
        held = self.catalog.sequences()
        self.out.changed_clients.update(self.acked)
        self.acked = {client: RangeSet() for client in self.acked}
        for client, sequence in held:
            if client != UNKNOWN_CLIENT:
                self.acked.setdefault(client, RangeSet()).add(sequence)

    def write(self, *, durable: bool = False) -> None:
        """Write rows, totals and acknowledged ranges to the catalog as one transaction."""
        acked = {client: self.acked[client].ranges() for client in self.out.changed_clients}
        self.catalog.write(
            self.out.rows, [series.row for series in self.series.values()], acked, durable=durable
        )
        self.out.rows.clear()


def _same(row: RecordRow | None, client: bytes, sequence: int) -> bool:
    return row is not None and (row.client, row.sequence) == (client, sequence)
