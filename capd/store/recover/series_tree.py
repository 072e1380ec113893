"""Compares the tree of series with what the catalog and the spool say of it, after an end that was not in order."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from capd.errors import DamagedRecord, NotAStore
from capd.store.disk.files import remove_tree
from capd.store.disk.layout import has_shards, series_on_disk, shard_path
from capd.store.documents.zarr_json import read_group
from capd.store.recover.state import Recovery
from capd.store.scan.published import read_shape
from capd.store.shards.series import SeriesState

__all__ = ["beyond_catalog", "mend_documents"]

logger = logging.getLogger(__name__)


def beyond_catalog(state: Recovery) -> str:
    """A series of this node of which more is sealed than the catalog knows, or "".

    A catalog that lost its write-ahead log, or the end of it, is sound and merely old.
    """
    run = state.layout.run
    for path in series_on_disk(run):
        directory, series = run / path, state.series.get(path)
        published = _length(directory / "data")
        if published is None or (series is not None and series.row.sealing):
            continue
        if series is None:
            if published and _owner(directory) == state.layout.node:
                return path
        elif published > series.row.sealed or _has_next_shard(run, series):
            return path
    return ""


def mend_documents(state: Recovery) -> None:
    """After a loss of power: write anew what it emptied of the metadata; a claim that nothing followed goes."""
    run = state.layout.run
    for path in list(series_on_disk(run)):
        directory, series = run / path, state.series.get(path)
        state.layout.ensure_groups(directory.parent)
        if _length(directory / "data") is not None and _owner(directory) is not None:
            continue
        if series is None:
            if not has_shards(directory):
                remove_tree(directory)
                logger.warning("%s: a claim without records, damaged by a loss of power, is removed", path)
        elif series.row.sealed:
            series.row.sealing = True  # it is published again
        else:
            state.layout.restore(series.header)


def _length(data: Path) -> int | None:
    """The array's length as published; None where the document cannot be read."""
    with contextlib.suppress(DamagedRecord):
        return read_shape(data.parent)[0]
    return None


def _owner(directory: Path) -> Any:
    """The node that a series' group names; None where the document cannot be read."""
    with contextlib.suppress(OSError, NotAStore, LookupError, TypeError):
        return (read_group(directory) or {})["attributes"]["capd"]["node"]
    return None


def _has_next_shard(run: Path, series: SeriesState) -> bool:
    number, inside = divmod(series.row.sealed, series.geometry.shard_records)
    return not inside and shard_path(run, series.header, number).exists()
