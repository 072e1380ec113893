"""The shards of a run that were moved to an object store, counted from its catalogs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from capd.errors import StoreError
from capd.store.catalog.rows import SeriesRow, read_series, stored_between
from capd.store.disk.layout import shard_path
from capd.store.scan.moved_shard import is_mostly_hole, moved_shard

__all__ = ["moved_nbytes", "moved_records"]


def moved_records(run: Path, row: SeriesRow) -> Iterator[range]:
    """Yield the numbers of the records in each moved shard of a series. Each full shard costs one look at its file."""
    per_shard = row.header.geometry.shard_records
    # The last shard is never moved.
    for shard in range((row.sealed - 1) // per_shard):
        path = shard_path(run, row.header, shard)
        try:
            # A stub whose hole was written takes its space here. Others need not be opened.
            is_moved = is_mostly_hole(path.stat()) and moved_shard(run, path) is not None
        except (StoreError, OSError):
            # `capd verify` finds the damage.
            continue
        if is_moved:
            yield range(shard * per_shard, (shard + 1) * per_shard)


def moved_nbytes(run: Path, database: sqlite3.Connection, rows: Iterable[SeriesRow] | None = None) -> int:
    """Return the stored bytes of the records that a catalog counts and that are in moved shards.

    Args:
        run: The run.
        database: The catalog.
        rows: The series; None: all of the catalog.
    """
    return sum(
        stored_between(database, row.id, numbers.start, numbers.stop)
        for row in (read_series(database) if rows is None else rows)
        for numbers in moved_records(run, row)
    )
