"""Repairs one node's part of a run. The caller holds the node's lock of the store root.

    spool     recovery replays, mends and sets aside; then everything is sealed. Its files stay in reach
    shards    a series with a damaged shard is built anew from its sound records, wherever they stand
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
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from capd.errors import DamagedRecord, NothingMatched, StoreError
from capd.store.catalog_check import read_slice
from capd.store.catalog_open import connect_read_only
from capd.store.catalog_read import CATALOG_NAME, SeriesRow, read_captures
from capd.store.damage import Damage, Report
from capd.store.files import make_directory, replace_files, sync_paths
from capd.store.frames import FORMAT_VERSION, FileHeader, RecordRow, SeriesHeader
from capd.store.layout import Layout, node_directory
from capd.store.mend import copy_aside, set_aside
from capd.store.new_catalog import UNREADABLE, forget_completeness, open_alone, readable_rows, rebuild_catalog
from capd.store.options import StoreOptions, open_files_within
from capd.store.published import read_published
from capd.store.rebuild import Rebuilt, rebuild_series
from capd.store.run import RunStore
from capd.store.spool_copies import HeldSpool, SpoolCopies
from capd.store.survey import row_from_columns, shard_files, survey_series
from capd.store.verify import run_identity, verify_run
from capd.store.verify_tree import group_documents

__all__ = ["Repair", "nodes_of", "repair_node", "take_over"]

logger = logging.getLogger(__name__)


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
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = RunStore(run.parent, run.stem, node, StoreOptions(open_files=open_files_within(soft)))
    try:
        store.seal()
    finally:
        store.close()


def repair_node(run: Path, node: str) -> Repair:
    """Do everything that helps; the damage that is left shows in the next `verify_run`.

    Raises StoreError or OSError where the disk does not allow it; then nothing is lost, and it can be done again.
    """
    done = Repair(run, node)
    directory = node_directory(run, node)
    _mend_groups(done)
    held = HeldSpool(directory / "spool", directory / "held")
    open_alone(run, node, check_spool=True)
    _seal(done)
    rows = _rows_by_path(run, node)
    headers = {path: row.header for path, row in rows.items()}
    run_ids = {run_identity(run), run.stem}  # they differ once somebody renamed the run
    with SpoolCopies(
        [directory / "spool", *held.directories],
        headers,
        lambda file: file.run_id in run_ids and file.node == node,
    ) as copies:
        own = [damage for damage in verify_run(run).damaged if damage.node == node]
        missing = _missing(run, node, copies)
        if own or missing:
            _mend_series(done, own, missing, rows, copies)
    held.release()
    return done


def _missing(run: Path, node: str, copies: SpoolCopies) -> set[str]:
    """Series with sound records in the spool as it was that are not in the catalog."""
    try:
        database = connect_read_only(node_directory(run, node) / CATALOG_NAME)
        try:
            return copies.missing(read_captures(database))
        finally:
            database.close()
    except UNREADABLE as error:
        logger.warning("the catalog of %s cannot be read: %s", run, error)
        return copies.missing(())


def _mend_series(
    done: Repair, own: list[Damage], missing: set[str], rows: dict[str, SeriesRow], copies: SpoolCopies
) -> None:
    """Build series with damaged shards or missing records anew, and all that is derived from the shards."""
    run, node = done.run, done.node
    shards = sorted({damage.series for damage in own if damage.kind == "shard" and damage.series} | missing)
    if shards:
        forget_completeness(run, node)
        for path in shards:
            _rebuild(done, path, rows.get(path), copies)
    for path in sorted({damage.series for damage in own if damage.kind == "metadata" and damage.series}):
        moments = run / path / "moments"
        if moments.exists():
            set_aside(moments, _quarantine(run, node), f"moments of {path}")
    rebuild_catalog(run, node)
    done.messages.append("catalog and metadata made anew from the frames")
    _seal(done)


def _quarantine(run: Path, node: str) -> Path:
    return node_directory(run, node) / "quarantine"


def _seal(done: Repair) -> None:
    """Seal what can be sealed: a shard that is damaged may not let itself be continued before it is built anew."""
    try:
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


def _rows_by_path(run: Path, node: str) -> dict[str, SeriesRow]:
    return {row.header.path: row for row in readable_rows(node_directory(run, node) / CATALOG_NAME)[0]}


def _rebuild(done: Repair, path: str, row: SeriesRow | None, copies: SpoolCopies) -> None:
    """Build a series anew from what is sound in its shards and in the spool.

    Rows whose COMMIT is lost come from the catalog or the metadata.
    """
    run, node = done.run, done.node
    header = copies.headers.get(path) if row is None else row.header
    published = None
    with contextlib.suppress(DamagedRecord):
        published = read_published(run / path)
    if published is not None and published.node not in ("", node):
        done.messages.append(
            f"{path}: it belongs to node {published.node}; copies of it in the spool stay out"
        )
        return
    surveyed = survey_series(run, path, node, header)
    header = surveyed.header if surveyed is not None else header
    if header is None:
        done.messages.append(f"{path}: nothing says what the series is; it stays as it is")
        return
    counts = [shard * header.geometry.shard_records for shard in shard_files(run / path)]
    counts += [max(surveyed.records, default=-1) + 1] if surveyed is not None else []
    counts += [row.sealed] if row is not None else []
    counts += [published.count] if published is not None else []
    layout = Layout(run, run_identity(run), node)
    file_header = FileHeader(FORMAT_VERSION, run_identity(run), node)
    rows = _rows_of(run, node, header, row)
    done.rebuilt.append(rebuild_series(layout, file_header, header, max(counts, default=0), rows, copies))


def _rows_of(run: Path, node: str, header: SeriesHeader, row: SeriesRow | None) -> Rows:
    catalog = node_directory(run, node) / CATALOG_NAME

    def rows(first: int, last: int) -> Mapping[int, RecordRow]:
        if row is not None:
            with contextlib.suppress(*UNREADABLE):
                return read_slice(catalog, row.id, first, last).rows
        try:
            columns = read_published(run / header.path).rows(first, last)
        except DamagedRecord:
            return {}
        return {number: row_from_columns(header, column) for number, column in enumerate(columns, first)}

    return rows
