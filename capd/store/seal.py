"""The steps of a seal between the two catalog marks, for a group of series at once.

index → sync → rename → sync directories → attributes → shape → sync. Each can be repeated: a series whose
file already bears its final name goes straight on to publishing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from capd.store.catalog import Catalog
from capd.store.columns import Columns
from capd.store.files import make_directory, sync_paths
from capd.store.layout import Layout, shard_path
from capd.store.series import Series
from capd.store.shards import ShardWriter

__all__ = ["finish_files", "publish"]


def finish_files(layout: Layout, group: Sequence[Series]) -> None:
    """Give the open shard of every series in `group` its index and its final name, durably. Raises OSError."""
    moves: list[tuple[ShardWriter, Path]] = []
    for series in group:
        shard = series.shard
        if shard is None or not shard.path.exists():
            continue  # renamed by an attempt that failed later
        shard.write_index(series.geometry.shard_slots)
        moves.append((shard, shard_path(layout.run, series.header, shard.number)))
    sync_paths((shard.path for shard, _ in moves), layout.run)
    for shard, target in moves:
        layout.dirty.update(make_directory(target.parent))
        shard.rename(target)
        layout.dirty.add(target.parent)
    layout.sync()


def publish(layout: Layout, catalog: Catalog, group: Sequence[Series]) -> None:
    """Publish moments, then the new shapes, of series whose records all stand in sealed shards. Raises OSError."""
    for series in group:
        if series.columns is None:
            series.columns = Columns()
        new = catalog.rows(series.row.id, len(series.columns), series.in_shards)
        series.columns.extend(row for _, row in new)
    layout.publish_columns(
        [(series.header, series.columns) for series in group if series.columns is not None]
    )
    layout.publish_shapes([(series.header, (series.in_shards, *series.row.max_shape)) for series in group])
