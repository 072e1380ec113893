"""The steps of a seal between the two catalog marks, for a group of series at once.

index → sync → rename → sync directories → attributes → shape → sync. Each step can be repeated. A series whose file
already has its final name is only published.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from capd.store.catalog.writer import Catalog
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import make_directory, sync_paths
from capd.store.disk.layout import Layout, shard_path
from capd.store.disk.open_files import OpenFiles, rewrite
from capd.store.format.columns import Columns, first_needed
from capd.store.format.dtypes import stored_shape
from capd.store.shards.series import SeriesState
from capd.store.shards.writer import ShardWriter

__all__ = ["finish_files", "publish"]


def finish_files(layout: Layout, group: Sequence[SeriesState], files: OpenFiles, *, is_last: bool) -> None:
    """Give the open shard of every series in `group` its index and its final name, durably.

    Args:
        layout: The run's directories and documents.
        group: The series to seal.
        files: The run's open files.
        is_last: Whether no rank captures any more, so that replaced chunks may go.

    Raises:
        OSError: A step failed. Shards whose sync failed are already copied to new files, which the next attempt uses.
    """
    moves: list[tuple[ShardWriter, Path]] = []
    failpoint("seal.before_index")
    shards = [series.shard for series in group if series.shard is not None]
    rewrite({s.path: s.end for s in shards if files.is_doubtful(s.path)}, files, layout.run)
    for series in group:
        shard = series.shard
        if shard is None or not shard.path.exists():
            # A previous attempt renamed it and failed later.
            continue
        # A power loss may have removed the groups.
        layout.ensure_groups((layout.run / series.header.path).parent)
        shard.write_index(series.geometry.shard_slots, is_last=is_last)
        moves.append((shard, shard_path(layout.run, series.header, shard.number)))
    failpoint("seal.after_index")
    try:
        sync_paths((shard.finished for shard, _ in moves), layout.run)
        # A shard's descriptor may have been closed in the meantime.
        if any(files.is_doubtful(shard.path) for shard, _ in moves):
            raise OSError(errno.EIO, "a shard could not be synced when it was closed")
    except OSError:
        files.distrust(shard.path for shard, _ in moves)
        rewrite({shard.path: shard.end for shard, _ in moves}, files, layout.run)
        raise
    failpoint("seal.after_sync")
    for shard, target in moves:
        make_directory(target.parent)
        shard.rename(target)
        layout.placed(target)
    layout.sync()
    failpoint("seal.after_rename")
    # Before the names are durable, a loss of power could take both files.
    for shard, _ in moves:
        shard.drop_partial()


def publish(layout: Layout, catalog: Catalog, group: Sequence[SeriesState]) -> None:
    """Publish the moments and the new shapes of series whose records are all in sealed shards. Raises OSError."""
    layout.publish(
        [(series.header, _columns(layout, catalog, series), _array_shape(series)) for series in group]
    )
    failpoint("seal.after_documents")


def _array_shape(series: SeriesState) -> tuple[int, ...]:
    """Return the new shape of a series' array. If all records are lost, it is the shape of the claim."""
    shape = series.row.max_shape or series.geometry.extents
    return (series.in_shards, *stored_shape(series.header.dtype, shape))


def _columns(layout: Layout, catalog: Catalog, series: SeriesState) -> Columns:
    first = first_needed(series.in_shards, layout.table_length(series.header))
    return Columns(first, catalog.columns(series.row.id, first, series.in_shards))
