"""Checks one node's directory on its own: the catalog's totals and the small logs."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from capd.errors import NotAStore, StoreError
from capd.store.catalog.opening import EmptyCatalog, connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.catalog.sums import RecordSums, catalog_problems, read_sums
from capd.store.disk.layout import PARTIAL_GLOB
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.log_places import LOG_GLOB, offset_of
from capd.store.scan.scan import ScannedLog, read_log, scan_shard
from capd.store.verify.damage import Damage, Kind

__all__ = ["NodePromise", "look_at_node"]

_OF_EVERY_RUN = {".capd", "zarr.json"}
_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError, RecursionError)


@dataclass(slots=True)
class NodePromise:
    """The content that a node's directory promises.

    Attributes:
        directory: The directory.
        catalog: The catalog file, None if it is unusable.
        rows: The series as the catalog counts them, by path.
        sums: The sums over the record rows of each series, by series id.
        logged: The rows of small records in logs, by series path and number.
        headers: The headers of unsealed series, by path.
        unsealed: The number after the newest record in a `.partial`, by series path.
        nbytes: The bytes read.
        damaged: The damage.
        notes: The notes.
    """

    directory: Path
    catalog: Path | None = None
    rows: dict[str, SeriesRow] = field(default_factory=dict)
    sums: dict[int, RecordSums] = field(default_factory=dict)
    logged: dict[str, dict[int, RecordRow]] = field(default_factory=dict)
    headers: dict[str, SeriesHeader] = field(default_factory=dict)
    unsealed: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.directory.name.removeprefix("node=")


def look_at_node(run: Path, directory: Path, run_ids: frozenset[str]) -> NodePromise:
    """Read a node's catalog totals first, then its logs and the headers of its `.partial` files.

    Raises:
        NotAStore: The catalog has a newer format.
    """
    node = NodePromise(directory)
    _read_catalog(run, node)
    spool = directory / "spool"
    for path in sorted(spool.glob(LOG_GLOB)):
        try:
            _read_log(run, run_ids, node, path)
        except FileNotFoundError:
            # All its records are in shards now.
            continue
        except OSError as error:
            _find(run, node, "spool", "", (), path, None, f"cannot be read: {error.strerror}")
    for path in sorted(spool.glob(PARTIAL_GLOB)):
        try:
            _read_partial(run, run_ids, node, path)
        except FileNotFoundError:
            # It was sealed in the meantime.
            continue
        except OSError as error:
            _find(run, node, "spool", "", (), path, None, f"cannot be read: {error.strerror}")
    quarantine = directory / "quarantine"
    if quarantine.is_dir() and (kept := sorted(path.name for path in quarantine.iterdir())):
        node.notes.append(
            f"{quarantine.relative_to(run)}: {len(kept)} entries kept for inspection: {kept[0]}, …"
        )
    return node


def _find(
    run: Path,
    node: NodePromise,
    kind: Kind,
    series: str,
    records: tuple[int, ...],
    path: Path,
    offset: int | None,
    what: str,
) -> None:
    file = str(path.relative_to(run))
    node.damaged.append(Damage(kind, series, records, file, offset, what, node.name))


def _read_catalog(run: Path, node: NodePromise) -> None:
    path = node.directory / CATALOG_NAME
    if _holds_nothing(run, node.directory) and not _has_tables(path):
        node.notes.append(
            f"{path.relative_to(run)}: does not exist yet, and no record is stored; the next start creates it"
        )
        return
    if not path.is_file():
        _find(run, node, "catalog", "", (), path, None, "the catalog is missing")
        return
    try:
        database = connect_read_only(path)
        try:
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
                node.notes.append(
                    f"{path.relative_to(run)}: incomplete; the next start reads the frames again"
                )
        finally:
            database.close()
    except NotAStore:
        raise
    except (StoreError, *_DAMAGED) as error:
        node.rows, node.sums = {}, {}
        _find(run, node, "catalog", "", (), path, None, f"the catalog is damaged: {error}")
        return
    node.catalog = path
    for series, what in problems:
        _find(run, node, "catalog", series, (), path, None, what)


def _has_tables(path: Path) -> bool:
    """Return whether a catalog exists. A kill during the first start of a run leaves none, or a file without tables."""
    if not path.is_file():
        return False
    try:
        connect_read_only(path).close()
    except EmptyCatalog:
        return False
    except (StoreError, sqlite3.DatabaseError):
        # The file is damaged, but not empty.
        pass
    return True


def _holds_nothing(run: Path, directory: Path) -> bool:
    """Return whether no record can have been stored: the spool is empty, and no node has a series."""
    return (
        not any((directory / "spool").glob("*")) and {entry.name for entry in run.iterdir()} <= _OF_EVERY_RUN
    )


def _read_log(run: Path, run_ids: frozenset[str], node: NodePromise, path: Path) -> None:
    size = path.stat().st_size
    log = read_log(path, check=True)
    if log is None:
        if size:
            _find(run, node, "spool", "", (), path, 0, "it is not a small log")
        return
    node.nbytes += log.end
    if log.file is None:
        _find(run, node, "spool", "", (), path, 0, "the header is damaged")
    elif log.file.run_id not in run_ids or log.file.node != node.name:
        what = f"belongs to run {log.file.run_id!r}, node {log.file.node!r}"
        _find(run, node, "spool", "", (), path, 0, what)
        return
    for logged in log.records:
        if logged.header is None:
            where = f"the series of sequence {logged.row.sequence} is lost"
            _find(run, node, "spool", "", (), path, offset_of(logged.place), where)
            continue
        series = logged.header.path
        node.headers.setdefault(series, logged.header)
        node.logged.setdefault(series, {})[logged.record] = logged.row
        if not logged.is_sound:
            what = "a small record fails its checksum"
            _find(run, node, "spool", series, (logged.record,), path, offset_of(logged.place), what)
    _check_gaps(run, node, path, log)


def _check_gaps(run: Path, node: NodePromise, path: Path, log: ScannedLog) -> None:
    for start, stop in log.gaps:
        # A gap after the last COMMIT belongs to an interrupted write.
        if start < log.end:
            what = f"no intact frame up to byte {stop}; the records there are lost"
            _find(run, node, "spool", "", (), path, start, what)


def _read_partial(run: Path, run_ids: frozenset[str], node: NodePromise, path: Path) -> None:
    # The size is read first, because a new file gets its header later.
    size = path.stat().st_size
    scanned = scan_shard(path)
    if scanned is None:
        if size:
            _find(run, node, "spool", "", (), path, 0, "it does not begin with an intact header")
        return
    file = scanned.file
    if file is not None and (file.run_id not in run_ids or file.node != node.name):
        _find(run, node, "spool", "", (), path, 0, f"belongs to run {file.run_id!r}, node {file.node!r}")
        return
    node.headers.setdefault(scanned.header.path, scanned.header)
    end = max(node.unsealed.get(scanned.header.path, 0), scanned.newest + 1)
    node.unsealed[scanned.header.path] = end
