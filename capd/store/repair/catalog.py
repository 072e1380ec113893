"""Rebuilds a node's catalog from the frames, and takes over the files of a dead node.

The caller holds the node's lock of the store root.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from capd.errors import NothingMatched, StoreError
from capd.store.catalog.opening import connect_read_only, distrust_schema, schema_problem
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, SessionRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import rename, sync_paths, unlink
from capd.store.disk.layout import Layout, node_directory, nodes_of
from capd.store.disk.open_files import OpenFiles
from capd.store.format.frames import SeriesHeader
from capd.store.recover.mend import copy_aside
from capd.store.recover.open_node import open_node
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.run_store import RunStore
from capd.store.verify.run import run_identity

__all__ = ["UNREADABLE", "forget_completeness", "rebuild_catalog", "take_over"]

logger = logging.getLogger(__name__)

_NEW_CATALOG = f"{CATALOG_NAME}.new"
# The errors of reading a damaged catalog, or damaged values in it.
UNREADABLE = (StoreError, sqlite3.DatabaseError, ValueError, TypeError, LookupError)


def rebuild_catalog(run: Path, node: str) -> None:
    """Replace a node's catalog by a new one from the frames.

    The counters of sessions are in no frame. They are copied from the old catalog if they can be read.

    Raises:
        StoreError: The node's part cannot be recovered.
        OSError: A file cannot be written.
    """
    directory = node_directory(run, node)
    old, new = directory / CATALOG_NAME, directory / _NEW_CATALOG
    series, sessions = _readable_rows(old)
    forget_completeness(run, node)
    for suffix in ("", "-wal", "-shm", "-journal"):
        unlink(directory / f"{_NEW_CATALOG}{suffix}", missing_ok=True)
    headers = {row.header.path: row.header for row in series}
    _open_alone(run, node, catalog_name=_NEW_CATALOG, headers=headers, sessions=sessions)
    for suffix in ("-wal", "-shm"):
        unlink(directory / f"{CATALOG_NAME}{suffix}", missing_ok=True)
    failpoint("catalog.before_swap")
    rename(new, old)
    sync_paths([old, directory], run)


def _open_alone(
    run: Path,
    node: str,
    *,
    catalog_name: str = CATALOG_NAME,
    headers: Mapping[str, SeriesHeader] | None = None,
    sessions: list[SessionRow] | None = None,
) -> None:
    """Recover a node's part, save `sessions`, and close it."""
    layout = Layout(run, run_identity(run), node)
    files = OpenFiles(64, durable=False)
    try:
        found = open_node(layout, files, catalog_name=catalog_name, headers=headers)
        for session in sessions or ():
            found.catalog.save_session(session)
        found.catalog.close()
    finally:
        files.close()


def _readable_rows(catalog: Path) -> tuple[list[SeriesRow], list[SessionRow]]:
    """Return the readable series and sessions of a catalog. A damaged catalog is copied to the quarantine."""
    if not catalog.is_file():
        return [], []
    try:
        database = connect_read_only(catalog)
        try:
            if database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                copy_aside(catalog, catalog.parent / "quarantine")
            return read_series(database), read_sessions(database)
        finally:
            database.close()
    except UNREADABLE as error:
        logger.warning("%s: cannot copy sessions and series to the new catalog: %s", catalog, error)
        copy_aside(catalog, catalog.parent / "quarantine")
        return [], []


def forget_completeness(run: Path, node: str) -> None:
    """Remove the mark of a complete catalog, so that the next start reads the frames.

    A catalog that is too damaged for this has no mark.
    """
    catalog = node_directory(run, node) / CATALOG_NAME
    if not catalog.is_file():
        return
    with contextlib.suppress(sqlite3.DatabaseError):
        database = sqlite3.connect(catalog, isolation_level=None)
        try:
            distrust_schema(database)
            if schema_problem(database) is not None:
                # Readers refuse this catalog, and its triggers must not run.
                return
            database.execute("PRAGMA synchronous=FULL")
            database.execute("DELETE FROM meta WHERE name='complete'")
            database.execute("PRAGMA journal_mode=DELETE")
        finally:
            database.close()


def take_over(run: Path, node: str) -> None:
    """Recover and seal the part of a dead node.

    Raises:
        NothingMatched: The run has no such node.
        StoreError: The part cannot be recovered or sealed.
        OSError: The disk refused.
    """
    if node not in nodes_of(run):
        raise NothingMatched(f"{run} has no node {node!r}; known: {', '.join(nodes_of(run)) or 'none'}")
    if run.suffix != ".zarr":
        raise StoreError(f"{run} does not end in .zarr; rename it, then try again")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = RunStore(run.parent, run.stem, node, StoreOptions(open_files=open_files_within(soft)))
    try:
        store.seal()
    finally:
        store.close()
