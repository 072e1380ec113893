"""Rows of records from the shards' own journals, for a reader that finds no usable catalog.

Slower than a catalog, since every frame header of every shard is read, but nothing is lost: COMMIT frames hold
all that the catalog does. `capd serve` or `capd verify --rebuild-catalog` makes the catalog anew.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from capd.store.catalog_read import SeriesRow
from capd.store.described import described
from capd.store.frames import RecordRow, SeriesHeader
from capd.store.scan import ScannedShard, scan_shard

__all__ = ["ShardedSeries", "all_from_shards", "series_from_shards"]


@dataclass(slots=True)
class ShardedSeries:
    """One series as its sealed shards tell it; rows by record number, those without a sound COMMIT absent."""

    series: SeriesRow
    rows: dict[int, RecordRow]


def all_from_shards(run: Path, node: str) -> dict[str, ShardedSeries]:
    """All series of a node that have sealed shards, by path; of every node if `node` is empty."""
    found: dict[str, ShardedSeries] = {}
    for chunks in sorted(run.glob("*/rank*/layer*/*/*/data/c")):
        shards = _scanned(chunks, None)
        owners = {shard.file.node for shard in shards if shard.file is not None}
        if (
            not shards
            and (documents := described(run, str(chunks.parent.parent.relative_to(run)))) is not None
        ):
            shards, owners = _scanned(chunks, documents[0]), {documents[1]}
        if shards and owners and (not node or node in owners):
            series = _gather(shards, shards[0].header)
            found[series.series.header.path] = series
    return found


def series_from_shards(run: Path, header: SeriesHeader) -> ShardedSeries:
    """One series of which everything but its catalog rows is known."""
    return _gather(_scanned(run / header.path / "data" / "c", header), header)


def _scanned(chunks: Path, header: SeriesHeader | None) -> list[ScannedShard]:
    """The journals of all shards; a shard whose HEADER is damaged is read with the one of its neighbours."""
    found: dict[int, ScannedShard] = {}
    files: dict[int, Path] = {}
    for directory in chunks.glob("*"):
        if directory.name.isdecimal():
            files |= {int(directory.name): path for path in directory.rglob("*") if path.is_file()}
    for _ in range(2):  # the second time for those in front of the first that told the series
        for number in sorted(files.keys() - found.keys()):
            with contextlib.suppress(OSError):
                scanned = scan_shard(files[number], None if header is None else (header, number))
                if scanned is not None:
                    found[number], header = scanned, scanned.header
    return [found[number] for number in sorted(found)]


def _gather(shards: list[ScannedShard], header: SeriesHeader) -> ShardedSeries:
    rows = {number: row for shard in shards for number, row in shard.rows.items()}
    count = max(rows, default=-1) + 1
    series = SeriesRow(
        id=-1,
        header=header,
        records=count,
        sealed=count,
        sealing=False,
        max_shape=tuple(map(max, zip(*(row.shape for row in rows.values()), strict=True))),
        raw_bytes=sum(row.nbytes for row in rows.values()),
        stored_bytes=sum(run.end - run.start for shard in shards for run in shard.runs),
    )
    return ShardedSeries(series, rows)
