"""Compares the tree of series with the catalog and the spool after an unclean end."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from capd.errors import DamagedRecord
from capd.store.disk.files import remove_tree
from capd.store.disk.layout import has_shards, series_on_disk, shard_path
from capd.store.recover.state import Recovery
from capd.store.scan.published import read_shape
from capd.store.shards.series import SeriesState

__all__ = ["beyond_catalog", "restore_documents"]

logger = logging.getLogger(__name__)


def beyond_catalog(state: Recovery) -> str:
    """Return a series of this node with more sealed records than the catalog knows, or "".

    A catalog that lost its write-ahead log, or the end of it, is intact but old.
    """
    run = state.layout.run
    for path in series_on_disk(run):
        directory, series = run / path, state.series.get(path)
        published = _length(directory / "data")
        if published is None or (series is not None and series.row.sealing):
            continue
        if series is None:
            if published and _owner(state, path) == state.layout.node:
                return path
        elif published > series.row.sealed or _has_next_shard(run, series):
            return path
    return ""


def restore_documents(state: Recovery) -> None:
    """Restore the metadata that a loss of power emptied. Remove a claimed series that got no records."""
    run = state.layout.run
    for path in list(series_on_disk(run)):
        directory, series = run / path, state.series.get(path)
        state.layout.ensure_groups(directory.parent)
        if _length(directory / "data") is not None and _owner(state, path):
            continue
        if series is None:
            if not has_shards(directory):
                remove_tree(directory)
                logger.warning("%s: removed a series without records that a loss of power damaged", path)
        elif series.row.sealed:
            # With this mark the series is published again.
            series.row.sealing = True
        else:
            state.layout.restore(series.header)


def _length(data: Path) -> int | None:
    """Return the published length of the array; None if the document cannot be read."""
    with contextlib.suppress(DamagedRecord):
        return read_shape(data.parent)[0]
    return None


def _owner(state: Recovery, path: str) -> str:
    """Return the node that the group of a series names; "" if the document cannot be read."""
    with contextlib.suppress(OSError):
        return str(state.layout.holder(path).get("node", ""))
    return ""


def _has_next_shard(run: Path, series: SeriesState) -> bool:
    number, inside = divmod(series.row.sealed, series.geometry.shard_records)
    return not inside and shard_path(run, series.header, number).exists()
