"""Repairs one node's part of a run. The caller holds the node's lock of the store root.

    spool     recovery replays, mends and sets aside; then everything is sealed. What small logs hold stays in reach
    shards    a series with a damaged shard is built anew from its sound records (`capd.store.rebuild`)
    metadata  published again from the catalog
    catalog   made anew from the frames beside the old one, which it then replaces

Whatever is taken out of the run is kept in the node's quarantine. Each step can be interrupted and done again:
from before the first change to a sealed series until all is done, the catalog bears no `complete` mark, so that
even a daemon that starts in between reads the frames anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from capd.errors import DamagedRecord, NothingMatched, StoreError
from capd.store.catalog_check import read_slice
from capd.store.catalog_read import (
    CATALOG_NAME,
    SeriesRow,
    SessionRow,
    connect_read_only,
    read_series,
    read_sessions,
)
from capd.store.damage import Damage, Report
from capd.store.failpoints import failpoint
from capd.store.files import make_directory, rename, replace_files, sync_paths, unlink
from capd.store.frames import FORMAT_VERSION, FileHeader, RecordRow, SeriesHeader
from capd.store.held_logs import HeldLogs, HeldRecords
from capd.store.layout import Layout, node_directory
from capd.store.mend import copy_aside, set_aside
from capd.store.open_files import OpenFiles
from capd.store.options import StoreOptions
from capd.store.published import read_published
from capd.store.rebuild import Rebuilt, rebuild_series
from capd.store.recover import open_node
from capd.store.run import RunStore
from capd.store.survey import row_from_columns, shard_files, survey_series
from capd.store.verify import run_identity, verify_run
from capd.store.verify_tree import group_documents

__all__ = ["Repair", "nodes_of", "rebuild_catalog", "repair_node", "take_over"]

logger = logging.getLogger(__name__)

_NEW_CATALOG = f"{CATALOG_NAME}.new"
_UNREADABLE = (StoreError, sqlite3.DatabaseError, ValueError, TypeError, LookupError)


@dataclass(slots=True)
class Repair:
    """What was done to one node's part of a run. rebuilt: series that were built anew, with what they lost.

    messages: what else was done, for people.
    """

    run: Path
    node: str
    rebuilt: list[Rebuilt] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def nodes_of(run: Path) -> list[str]:
    """Nodes that wrote to a run."""
    return sorted(path.name.removeprefix("node=") for path in (run / ".capd").glob("node=*"))


def take_over(run: Path, node: str) -> None:
    """Recover what a node left behind and seal it. Raises NothingMatched for an unknown node, StoreError, OSError."""
    if node not in nodes_of(run):
        raise NothingMatched(f"{run} has no node {node!r}; known: {', '.join(nodes_of(run)) or 'none'}")
    if run.suffix != ".zarr":
        raise StoreError(f"{run} does not end in .zarr; rename it, then repair it")
    store = RunStore(run.parent, run.stem, node, StoreOptions())
    try:
        store.seal()
    finally:
        store.close()


def repair_node(run: Path, node: str) -> Repair:
    """Do everything that helps; the damage that is left shows in the next `verify_run`. Raises StoreError, OSError."""
    done = Repair(run, node)
    _mend_groups(done)
    logs = HeldLogs(node_directory(run, node) / "spool", node_directory(run, node) / "held")
    _seal(done, check_spool=True)
    own = [damage for damage in verify_run(run).damaged if damage.node == node]
    if own:
        _mend_series(done, own, logs)
    logs.release()
    return done


def _mend_series(done: Repair, own: list[Damage], logs: HeldLogs) -> None:
    """Build series with damaged shards anew, and all that is derived from the shards."""
    run, node = done.run, done.node
    shards = sorted({damage.series for damage in own if damage.kind == "shard" and damage.series})
    if shards:
        rows, held = _catalog_rows(run, node), logs.records(frozenset(shards))
        _forget_completeness(run, node)
        for path in shards:
            _rebuild(done, path, rows.get(path), held)
    for path in sorted({damage.series for damage in own if damage.kind == "metadata" and damage.series}):
        moments = run / path / "moments"
        if moments.exists():
            set_aside(moments, _quarantine(run, node), f"moments of {path}")
    rebuild_catalog(run, node)
    done.messages.append("catalog and metadata made anew from the frames")
    _seal(done)


def rebuild_catalog(run: Path, node: str) -> None:
    """Make a node's catalog anew from the frames, and let it replace the old one. Raises StoreError, OSError.

    The counters of sessions, which stand in no frame, are carried over if they can be read.
    """
    directory = node_directory(run, node)
    old, new = directory / CATALOG_NAME, directory / _NEW_CATALOG
    series, sessions = _readable_rows(old)
    _forget_completeness(run, node)
    for suffix in ("", "-wal", "-shm", "-journal"):
        unlink(directory / f"{_NEW_CATALOG}{suffix}", missing_ok=True)
    headers = {row.header.path: row.header for row in series}
    _open_alone(run, node, catalog_name=_NEW_CATALOG, headers=headers, sessions=sessions)
    for suffix in ("-wal", "-shm"):
        unlink(directory / f"{CATALOG_NAME}{suffix}", missing_ok=True)
    failpoint("catalog.before_swap")
    rename(new, old)
    sync_paths([old, directory], run)


def _quarantine(run: Path, node: str) -> Path:
    return node_directory(run, node) / "quarantine"


def _open_alone(
    run: Path,
    node: str,
    *,
    catalog_name: str = CATALOG_NAME,
    headers: Mapping[str, SeriesHeader] | None = None,
    sessions: list[SessionRow] | None = None,
    check_spool: bool = False,
) -> None:
    """Recover a node's part, save `sessions`, and close it again."""
    layout = Layout(run, run_identity(run), node)
    files = OpenFiles(64, durable=False)
    try:
        found = open_node(layout, files, catalog_name=catalog_name, headers=headers, check_spool=check_spool)
        for session in sessions or ():
            found.catalog.save_session(session)
        found.catalog.close()
    finally:
        files.close()


def _readable_rows(catalog: Path) -> tuple[list[SeriesRow], list[SessionRow]]:
    """Series and sessions of a catalog as far as they can be read; a damaged one is kept in the quarantine."""
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
    except _UNREADABLE as error:
        logger.warning("%s: sessions and series cannot be carried over: %s", catalog, error)
        copy_aside(catalog, catalog.parent / "quarantine")
        return [], []


def _forget_completeness(run: Path, node: str) -> None:
    """Take the mark away that spares a start reading the frames; a catalog too damaged for that has none."""
    catalog = node_directory(run, node) / CATALOG_NAME
    if not catalog.is_file():
        return
    with contextlib.suppress(sqlite3.DatabaseError):
        database = sqlite3.connect(catalog, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous=FULL")
            database.execute("DELETE FROM meta WHERE name='complete'")
            database.execute("PRAGMA journal_mode=DELETE")
        finally:
            database.close()


def _seal(done: Repair, *, check_spool: bool = False) -> None:
    try:
        if check_spool:
            _open_alone(done.run, done.node, check_spool=True)
        take_over(done.run, done.node)
    except StoreError as error:
        if error.exit_code != 1:
            raise
        done.messages.append(str(error))


def _mend_groups(done: Repair) -> None:
    """Write the zarr.json of the run and of the groups above series anew where it is damaged."""
    run, quarantine = done.run, _quarantine(done.run, done.node)
    report = Report(run)
    run_id = run_identity(run, report)
    spool = node_directory(run, done.node) / "spool"
    make_directory(spool)
    if report.damaged:
        _write_group(run, spool, quarantine, {"capd": {"format": FORMAT_VERSION, "run_id": run_id}})
        done.messages.append("zarr.json of the run written anew")
    for damage in group_documents(run):
        _write_group((run / damage.file).parent, spool, quarantine, {})
        done.messages.append(f"{damage.file} written anew")


def _write_group(group: Path, spool: Path, quarantine: Path, attributes: dict[str, object]) -> None:
    path = group / "zarr.json"
    if path.is_dir():
        set_aside(path, quarantine, "a directory stands where metadata belongs")
    elif path.exists():
        copy_aside(path, quarantine)
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    replace_files({path: json.dumps(document).encode()}, spool)
    sync_paths([group], group)


Rows = Callable[[int, int], Mapping[int, RecordRow]]


def _catalog_rows(run: Path, node: str) -> dict[str, SeriesRow]:
    return {row.header.path: row for row in _readable_rows(node_directory(run, node) / CATALOG_NAME)[0]}


def _rebuild(done: Repair, path: str, row: SeriesRow | None, held: HeldRecords) -> None:
    """Build a series anew from what is sound in its shards or in held logs.

    Rows whose COMMIT is lost come from the catalog or the metadata.
    """
    run, node = done.run, done.node
    surveyed = survey_series(run, path, node, None if row is None else row.header)
    header = surveyed.header if surveyed is not None else None if row is None else row.header
    if header is None:
        done.messages.append(f"{path}: nothing says what the series is; it stays as it is")
        return
    counts = [shard * header.geometry.shard_records for shard in shard_files(run / path)]
    counts += [max(surveyed.records, default=-1) + 1] if surveyed is not None else []
    counts += [row.sealed] if row is not None else []
    with contextlib.suppress(DamagedRecord):
        counts.append(read_published(run / path).count)
    layout = Layout(run, run_identity(run), node)
    file_header = FileHeader(FORMAT_VERSION, run_identity(run), node)
    rows = _rows_of(run, node, header, row)
    done.rebuilt.append(rebuild_series(layout, file_header, header, max(counts, default=0), rows, held))


def _rows_of(run: Path, node: str, header: SeriesHeader, row: SeriesRow | None) -> Rows:
    catalog = node_directory(run, node) / CATALOG_NAME

    def rows(first: int, last: int) -> Mapping[int, RecordRow]:
        if row is not None:
            with contextlib.suppress(*_UNREADABLE):
                return read_slice(catalog, row.id, first, last).rows
        try:
            columns = read_published(run / header.path).rows(first, last)
        except DamagedRecord:
            return {}
        return {number: row_from_columns(header, column) for number, column in enumerate(columns, first)}

    return rows
