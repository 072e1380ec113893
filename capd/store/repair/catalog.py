"""Rebuilds a node's catalog from the frames, and takes over the files of a dead node.

The caller holds the node's lock of the store root.
"""

from __future__ import annotations

import contextlib
import resource
import sqlite3
from pathlib import Path

from capd.errors import NothingMatched, StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, SessionRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.disk.files import unlink
from capd.store.disk.layout import Layout, node_directory, nodes_of
from capd.store.disk.open_files import OpenFiles
from capd.store.recover.damaged_files import set_aside
from capd.store.recover.open_node import open_node
from capd.store.remote.moved_rows import MovedRows
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.run_store import RunStore
from capd.store.verify.run import run_identity

__all__ = ["UNREADABLE", "readable_rows", "rebuild_catalog", "take_over"]

# The errors of reading a damaged catalog, or damaged values in it.
UNREADABLE = (StoreError, sqlite3.DatabaseError, ValueError, TypeError, LookupError)


def rebuild_catalog(run: Path, node: str) -> None:
    """Build a node's catalog again from the frames.

    The counters of sessions are in no frame. They are kept if they can be read.

    Raises:
        StoreError: The node's part cannot be recovered.
        OSError: A file cannot be written.
    """
    directory = node_directory(run, node)
    series, sessions, problem = readable_rows(directory / CATALOG_NAME)
    if problem:
        set_aside(directory / CATALOG_NAME, directory / "quarantine", problem)
        for suffix in ("-wal", "-shm"):
            unlink(directory / f"{CATALOG_NAME}{suffix}", missing_ok=True)
    headers = {row.header.path: row.header for row in series}
    files = OpenFiles(64, durable=False)
    try:
        layout = Layout(run, run_identity(run), node)
        try:
            catalog = open_node(layout, files, rebuild=headers, complete=MovedRows(node)).catalog
            for session in sessions:
                catalog.save_session(session)
            catalog.close()
        finally:
            layout.close()
    finally:
        files.close()


def readable_rows(catalog: Path) -> tuple[list[SeriesRow], list[SessionRow], str]:
    """Return the series and the sessions of a catalog, as far as they can be read, and its damage, or ""."""
    series: list[SeriesRow] = []
    sessions: list[SessionRow] = []
    if not catalog.is_file():
        return series, sessions, ""
    try:
        with contextlib.closing(connect_read_only(catalog)) as database:
            series = read_series(database)
            sessions = read_sessions(database)
            check = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            return series, sessions, "" if check == "ok" else str(check)
    except UNREADABLE as error:
        return series, sessions, str(error)


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
