"""The removal of whole series: tombstone in the run's document, then into the trash, then out of the catalog.

A run with an unfinished removal names its series under `removing`. Readers do not show them. `finish` completes the
removal from any step on: the next command that removes something calls it, and so does a daemon that opens the run.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from capd.errors import StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.place import CatalogPlace
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.catalog.writer import Catalog
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import make_directory, rename, sync_paths
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.disk.run_document import change_attributes
from capd.store.disk.run_lock import RunLock
from capd.store.documents.tombstone import RemovedSeries, Tombstone, removed_series
from capd.store.documents.zarr_json import run_attributes
from capd.store.format.dtypes import is_errors
from capd.store.remove.trash_place import check_trash, new_entry, trash_of

__all__ = ["MAX_REMOVED_PATHS", "finish", "finish_removal", "remove_series"]

# Another node that opens the run at the same time completes the removal, too.
_PATIENCE_S = 30.0

# With more, the run's document would be slow to read for everybody.
MAX_REMOVED_PATHS = 100_000


def remove_series(run: Path, paths: Sequence[str], mark: Tombstone) -> RemovedSeries:
    """Remove sealed series. The caller holds the lock of the run alone.

    Args:
        run: The directory of the run.
        paths: The paths of the series.
        mark: When, and by whom.

    Returns:
        What was removed.

    Raises:
        StoreError: A node has unsealed records or no sound catalog, or the run already names too many removed series.
        OSError: The disk refused. A later call continues.
    """
    finish(run)
    attributes = run_attributes(run)
    named = sum(len(one.paths) for one in removed_series(attributes))
    if named + len(paths) > MAX_REMOVED_PATHS:
        raise StoreError(
            f"{run} would name more than {MAX_REMOVED_PATHS:,} removed series; remove the whole run instead"
        )
    records, stored = _check(run, paths)
    check_trash(run.parent)
    linked = next((path for path in paths if not _is_plain(run, path)), None)
    if linked is not None:
        raise StoreError(
            f"{run / linked} is reached by a symbolic link, nothing removed; replace the link by its target"
        )
    gone = RemovedSeries(mark, new_entry(run.parent).name, records, stored, tuple(sorted(paths)))
    failpoint("remove.before_mark")
    change_attributes(run, lambda capd: _append(capd, "removing", gone))
    failpoint("remove.after_mark")
    finish(run)
    return gone


def finish(run: Path) -> None:
    """Complete a removal of series that a kill interrupted. The caller holds the lock of the run.

    Raises:
        StoreError: A catalog cannot be changed.
        OSError: The disk refused. A later call continues.
    """
    removing = removed_series(run_attributes(run, removed=True), "removing")
    if not removing:
        return
    for gone in removing:
        _move(run, gone)
    failpoint("remove.after_move")
    paths = [path for gone in removing for path in gone.paths]
    for node in nodes_of(run):
        _forget(run, node, paths)
    failpoint("remove.after_catalog")
    change_attributes(run, _done)
    failpoint("remove.after_done")


def finish_removal(run: Path) -> None:
    """Complete an interrupted removal before a writer opens a run. Raises as `finish`, and StoreBusy."""
    if (run / "zarr.json").exists() and removed_series(run_attributes(run, removed=True), "removing"):
        with RunLock.alone(run, _PATIENCE_S):
            finish(run)


def _check(run: Path, paths: Iterable[str]) -> tuple[int, int]:
    """Return records and stored bytes of the series. Raises StoreError if they cannot be removed as they are."""
    wanted, records, stored = set(paths), 0, 0
    for node in nodes_of(run):
        directory = node_directory(run, node)
        seal = (
            f"seal it first: start `capd serve --store {run.parent}`, or `capd verify {run} --adopt {node}`"
        )
        if any((directory / "spool").glob("*")):
            raise StoreError(f"node {node} of {run} has records that are not sealed; {seal}")
        catalog = directory / CATALOG_NAME
        if not catalog.is_file() or catalog.with_name(f"{CATALOG_NAME}-wal").exists():
            raise StoreError(f"the catalog {catalog} was not closed; {seal}")
        with contextlib.closing(connect_read_only(catalog)) as db:
            try:
                rows = db.execute("SELECT path, dtype, records, stored_bytes FROM series").fetchall()
            except sqlite3.DatabaseError as error:
                raise StoreError(
                    f"the catalog {catalog} is damaged ({error}); `capd verify {run} --rebuild-catalog` first"
                ) from error
        for path, dtype, count, nbytes in rows:
            if path in wanted:
                # Errors of formats are not among the records of a run.
                records += 0 if is_errors(str(dtype)) else count
                stored += nbytes
    return records, stored


def _move(run: Path, gone: RemovedSeries) -> None:
    """Move the directories of series into the trash, those that are not there yet."""
    place = trash_of(run.parent) / gone.entry / f"{run.name}.series"
    touched = set(make_directory(place))
    for path in gone.paths:
        source, target = run / path, place / path
        # An entry that is there already was moved before a kill. A daemon may have made the series again.
        # A link within the path would move a directory that is not the run's.
        if source.is_dir() and not target.exists() and _is_plain(run, path):
            touched.update(make_directory(target.parent))
            rename(source, target)
            touched |= {source.parent, target.parent}
    sync_paths(touched, run)


def _is_plain(run: Path, path: str) -> bool:
    """Return whether no directory on the way to a series is a symbolic link."""
    return os.path.realpath(run / path) == os.path.join(os.path.realpath(run), path)


def _forget(run: Path, node: str, paths: Sequence[str]) -> None:
    place = CatalogPlace(node_directory(run, node))
    place.fetch()
    try:
        catalog = Catalog(place.live, place if place.is_apart else None)
        try:
            catalog.remove_series(paths)
        except BaseException:
            catalog.abandon()
            raise
        catalog.close()
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"the catalog of {node} in {run} is damaged ({error}); `capd verify {run} --rebuild-catalog` first"
        ) from error


def _append(capd: dict[str, Any], member: str, gone: RemovedSeries) -> None:
    found = capd.get(member)
    capd[member] = [*(found if isinstance(found, list) else ()), gone.plain()]


def _done(capd: dict[str, Any]) -> None:
    for gone in removed_series(capd, "removing"):
        _append(capd, "removed_series", gone)
    capd.pop("removing", None)
