"""Checks one node's directory on its own: the catalog's totals, the small logs, the alerts and the keeps."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capd.errors import NotAStore, StoreError
from capd.store.alerts.file import ALERTS_NAME, read_alerts
from capd.store.catalog.opening import EmptyCatalog, connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.catalog.sums import RecordSums, catalog_problems, read_sums
from capd.store.disk.layout import PARTIAL_GLOB
from capd.store.disk.line_file import Lines
from capd.store.disk.run_lock import is_written
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.log_places import LOG_GLOB, offset_of
from capd.store.keeps.file import keeps_path, read_keeps
from capd.store.keeps.held_files import describe_left, left_segments
from capd.store.scan.scan import read_log, scan_shard
from capd.store.verify.damage import Kind, Report

__all__ = ["NodePromise", "look_at_node"]

_OF_EVERY_RUN = {".capd", "zarr.json"}
_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError, RecursionError)


@dataclass(slots=True)
class NodePromise:
    """The content that a node's directory promises.

    Attributes:
        directory: The directory.
        report: The damage and the notes.
        catalog: The catalog file, None if it is unusable.
        rows: The series as the catalog counts them, by path.
        sums: The sums over the record rows of each series, by series id.
        logged: The rows of small records in logs, by series path and number.
        headers: The headers of unsealed series, by path.
        unsealed: The number after the newest record in a `.partial`, by series path.
    """

    directory: Path
    report: Report
    catalog: Path | None = None
    rows: dict[str, SeriesRow] = field(default_factory=dict)
    sums: dict[int, RecordSums] = field(default_factory=dict)
    logged: dict[str, dict[int, RecordRow]] = field(default_factory=dict)
    headers: dict[str, SeriesHeader] = field(default_factory=dict)
    unsealed: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.directory.name.removeprefix("node=")

    def find(self, kind: Kind, path: Path, what: str, **place: Any) -> None:
        """Add damage to the report."""
        self.report.find(kind, path, what, node=self.name, **place)


def look_at_node(run: Path, directory: Path, run_ids: frozenset[str]) -> NodePromise:
    """Read a node's catalog totals first, then its logs and the headers of its `.partial` files.

    Raises:
        NotAStore: The catalog has a newer format.
    """
    node = NodePromise(directory, Report(run))
    _read_catalog(run, node)
    for pattern, read in ((LOG_GLOB, _read_log), (PARTIAL_GLOB, _read_partial)):
        for path in sorted((directory / "spool").glob(pattern)):
            try:
                read(node, path, run_ids)
            except FileNotFoundError:
                # All its records are in shards now, or it was sealed.
                continue
            except OSError as error:
                node.find("spool", path, f"cannot be read: {error.strerror}")
    _read_lines(node, "alerts", directory / ALERTS_NAME, read_alerts)
    _read_lines(node, "keeps", keeps_path(run, node.name), read_keeps)
    _note_held(run, node)
    quarantine = directory / "quarantine"
    if quarantine.is_dir() and (kept := sorted(path.name for path in quarantine.iterdir())):
        node.report.notes.append(
            f"{quarantine.relative_to(run)}: {len(kept)} entries kept for inspection: {kept[0]}, …"
        )
    return node


def _read_lines(node: NodePromise, kind: Kind, path: Path, read: Callable[[Path], Lines[Any]]) -> None:
    try:
        lines = read(path)
    except (StoreError, OSError) as error:
        node.find(kind, path, f"cannot be read: {error}")
        return
    node.report.nbytes += lines.nbytes
    # A part of a line at the end is of a kill, and no damage.
    for offset in lines.damaged:
        node.find(kind, path, f"a line is no {kind.removesuffix('s')}", offset=offset)


def _note_held(run: Path, node: NodePromise) -> None:
    """Tell of held records whose daemon is gone. They are no records yet, so nothing of them is damage."""
    held = list(left_segments(run, node.name))
    if held and not is_written(run):
        node.report.notes.append(f"{node.directory.relative_to(run)}: {describe_left(held)}")


def _read_catalog(run: Path, node: NodePromise) -> None:
    path, holds_nothing = node.directory / CATALOG_NAME, _holds_nothing(run, node.directory)
    try:
        if not path.is_file():
            raise EmptyCatalog("it is missing")
        with contextlib.closing(connect_read_only(path)) as database:
            check = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if check != "ok":
                raise sqlite3.DatabaseError(check)
            database.execute("BEGIN")
            node.rows = {row.header.path: row for row in read_series(database)}
            node.sums = read_sums(database)
            problems = list(catalog_problems(database, node.sums))
            read_sessions(database)
            identities = {row.id for row in node.rows.values()}
            if node.sums.keys() - identities:
                raise sqlite3.DatabaseError("it has records of series that it does not know")
            if database.execute("SELECT 1 FROM meta WHERE name='complete'").fetchone() is None:
                node.report.notes.append(
                    f"{path.relative_to(run)}: incomplete; the next start reads the frames again"
                )
    except NotAStore:
        raise
    except (StoreError, *_DAMAGED) as error:
        node.rows, node.sums = {}, {}
        if holds_nothing and isinstance(error, EmptyCatalog):
            # A kill during the first start of a run leaves no catalog, or a file without tables.
            node.report.notes.append(
                f"{path.relative_to(run)}: does not exist yet, and no record is stored; the next start creates it"
            )
        else:
            what = f"the catalog is damaged: {error}" if path.is_file() else "the catalog is missing"
            node.find("catalog", path, what)
        return
    node.catalog = path
    for series, what in problems:
        node.find("catalog", path, what, series=series)


def _holds_nothing(run: Path, directory: Path) -> bool:
    """Return whether no record can have been stored: the spool is empty, and no node has a series."""
    return (
        not any((directory / "spool").glob("*")) and {entry.name for entry in run.iterdir()} <= _OF_EVERY_RUN
    )


def _read_log(node: NodePromise, path: Path, run_ids: frozenset[str]) -> None:
    size = path.stat().st_size
    log = read_log(path, check=True)
    if log is None:
        if size:
            node.find("spool", path, "it is not a small log", offset=0)
        return
    node.report.nbytes += log.end
    foreign = "" if log.file is None else log.file.foreign(run_ids, node.name)
    if foreign or log.file is None:
        node.find("spool", path, foreign or "the header is damaged", offset=0)
    for logged in () if foreign else log.records:
        at = offset_of(logged.place)
        if logged.header is None:
            what = f"the series of sequence {logged.row.sequence} is lost"
            node.find("spool", path, what, offset=at)
            continue
        series = logged.header.path
        node.headers.setdefault(series, logged.header)
        node.logged.setdefault(series, {})[logged.record] = logged.row
        if not logged.is_sound:
            what = "a small record fails its checksum"
            node.find("spool", path, what, series=series, records=[logged.record], offset=at)
    for start, stop in () if foreign else log.gaps:
        # A gap after the last COMMIT belongs to an interrupted write.
        if start < log.end:
            what = f"no intact frame up to byte {stop}; the records there are lost"
            node.find("spool", path, what, offset=start)


def _read_partial(node: NodePromise, path: Path, run_ids: frozenset[str]) -> None:
    # The size is read first, because a new file gets its header later.
    size = path.stat().st_size
    scanned = scan_shard(path)
    what = "it does not begin with an intact header" if scanned is None and size else ""
    if scanned is not None and scanned.file is not None:
        what = scanned.file.foreign(run_ids, node.name)
    if what:
        node.find("spool", path, what, offset=0)
    elif scanned is not None:
        series = scanned.header.path
        node.headers.setdefault(series, scanned.header)
        node.unsealed[series] = max(node.unsealed.get(series, 0), scanned.newest + 1)
