"""Opens one node's part of a run after any end of the daemon before: catalog, spool and shards made consistent.

The catalog may lag behind the frames by what was not yet written in a batch, so `.partial` files and small
logs are replayed; a missing or damaged catalog is rebuilt from all frames. A `.partial` is cut behind its
last COMMIT. A seal that was interrupted between rename and catalog mark is published again.

Damage in the spool costs the records it touched, and never keeps a run from opening: a `.partial` that lost a
COMMIT in its middle, or a log that lost a record, is written anew without it (`capd.store.recover.mend`); what cannot
be read, or belongs to another run, node or place, moves to the quarantine with a warning. Elements in a `.partial` are
read here only after a loss of power (`capd.store.disk.power`): else damage to them shows when somebody reads them, or
in `capd verify`. Published records keep
their numbers, also one that nothing names any more when a new catalog is made: it is listed and cannot be read.
`capd verify RUN --repair -o NEW` makes a run without it. Every step can be interrupted and done again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from capd.errors import StoreError, StoreFull
from capd.space import if_full
from capd.store.catalog.place import CatalogPlace
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.catalog.writer import Catalog
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import remove_tree, unlink
from capd.store.disk.layout import PARTIAL_GLOB, Layout, node_directory, partial_path, shard_path
from capd.store.disk.open_files import OpenFiles
from capd.store.format.frames import UNKNOWN_CLIENT, SeriesHeader
from capd.store.format.log_places import LOG_GLOB
from capd.store.recover.mend import set_aside
from capd.store.recover.partials import records_on_disk, take_up_partials
from capd.store.recover.series_tree import beyond_catalog, mend_documents
from capd.store.recover.small_logs import replay_logs
from capd.store.recover.state import Recovered, Recovery
from capd.store.scan.survey import Sealed, SurveyedSeries, log_if_readable, scan_if_readable, survey
from capd.store.shards.seal import publish
from capd.store.shards.series import SeriesState

__all__ = ["Recovered", "open_node"]

logger = logging.getLogger(__name__)

# What reading a catalog with damaged pages or values raises; msgspec's errors are ValueErrors.
_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError)


def open_node(
    layout: Layout,
    files: OpenFiles,
    *,
    catalog_name: str = CATALOG_NAME,
    headers: Mapping[str, SeriesHeader] | None = None,
) -> Recovered:
    """Bring one node's part of the run to a consistent state; raises StoreError if the disk does not allow it.

    catalog_name: of the file to open or make in the node's directory. headers: of series by path, for those of which
    no file says what they are.
    """
    place = CatalogPlace(node_directory(layout.run, layout.node), catalog_name)
    catalog = place.published
    try:
        place.fetch()
        try:
            return _open(layout, files, place, headers or {})
        except _DAMAGED as error:  # what merely passes is a StoreError already
            logger.warning("%s is damaged (%s): rebuilding it from the shard files", catalog, error)
            set_aside(catalog, catalog.parent / "quarantine", str(error))
            for suffix in ("-wal", "-shm"):
                unlink(catalog.with_name(catalog.name + suffix), missing_ok=True)
            place.fetch()
            return _open(layout, files, place, headers or {})
    except (OSError, *_DAMAGED) as error:
        full = if_full(error, layout.run)
        if full is not error:
            raise StoreFull(f"cannot open {layout.run}: {full}, then try again") from error
        raise StoreError(
            f"cannot recover {layout.run}: {error}; check the disk, then start `capd serve` again"
        ) from error


def _open(
    layout: Layout,
    files: OpenFiles,
    place: CatalogPlace,
    headers: Mapping[str, SeriesHeader],
) -> Recovered:
    path = place.published
    if path.is_dir():
        set_aside(path, path.parent / "quarantine", "a directory stands where the catalog belongs")
    catalog = Catalog(place.live, place if place.is_apart else None)
    try:
        _clear_leftovers(layout.spool)
        state = Recovery(layout, files, catalog, headers)
        if not (state.fresh or catalog.was_closed) and (series := beyond_catalog(state)):
            logger.warning("%s lacks sealed records of %s: rebuilding it from the shard files", path, series)
            catalog.mark_incomplete()
            state = Recovery(layout, files, catalog, headers)
        if state.fresh:
            _read_sealed(state)
        take_up_partials(state)
        failpoint("recover.after_partials")
        state.write()
        if state.may_be_torn:
            mend_documents(state)
        _finish_seals(state)
        failpoint("recover.after_seals")
        replay_logs(state)
        failpoint("recover.after_logs")
        _reconcile(state)
        if state.lost:
            state.write()
            state.acknowledge_what_is_there()
        state.write(durable=True)
        catalog.mark_complete(state.mounted)
        catalog.publish()
    except BaseException:
        catalog.abandon()
        raise
    state.out.series = list(state.series.values())
    state.out.acked = {client: ranges.ranges() for client, ranges in state.acked.items()}
    return state.out


def _read_sealed(state: Recovery) -> None:
    headers, logged = _headers_and_captures(state)
    for found in survey(state.layout.run, state.layout.node, {**headers, **state.headers}):
        _name_by_partials(state, found)
        if found.lost:
            logger.warning(
                "%s: nothing says what the records %s were; `capd verify %s --repair -o NEW` makes a run without them",
                found.header.path, found.lost, state.layout.run,
            )  # fmt: skip
            found.keep_numbers()
        _add_sealed(state, found, logged)


def _headers_and_captures(state: Recovery) -> tuple[dict[str, SeriesHeader], set[tuple[bytes, int]]]:
    """Of the spool: the series that its files name, by path, and client and sequence of each logged record."""
    headers: dict[str, SeriesHeader] = {}
    logged: set[tuple[bytes, int]] = set()
    for path in state.layout.spool.glob(PARTIAL_GLOB):
        scanned = scan_if_readable(path, None)
        if scanned is not None and scanned.file is not None and state.owns(scanned.file):
            headers[scanned.header.path] = scanned.header
    for path in state.layout.spool.glob(LOG_GLOB):
        log = log_if_readable(path)
        if log is not None and (log.file is None or state.owns(log.file)):
            headers.update((header.path, header) for header in log.headers.values())
            logged.update((record.row.client, record.row.sequence) for record in log.records)
    return headers, logged


def _name_by_partials(state: Recovery, found: SurveyedSeries) -> None:
    """Take the rows of records whose COMMIT is lost from the `.partial` that goes on with their shard."""
    nameless = [n for n, sealed in found.records.items() if sealed.row.client == UNKNOWN_CLIENT]
    missing = {*nameless, *found.lost}
    for shard in {number // found.header.geometry.shard_records for number in missing}:
        path = partial_path(state.layout.spool, found.header.path, shard)
        scanned = scan_if_readable(path, (found.header, shard)) if path.is_file() else None
        if scanned is None or (scanned.header.path, scanned.shard) != (found.header.path, shard):
            continue
        if scanned.file is None or state.owns(scanned.file):
            for number in missing & scanned.rows.keys():
                found.records[number] = Sealed(scanned.rows[number], 0)
    found.lost = [number for number in found.lost if number not in found.records]


def _add_sealed(state: Recovery, found: SurveyedSeries, logged: set[tuple[bytes, int]]) -> None:
    series = state.series_of(found.header)
    for number, sealed in sorted(found.records.items()):
        state.add(series, number, sealed.row, sealed.stored_nbytes)
    if found.header.geometry.is_small:
        captures = {(sealed.row.client, sealed.row.sequence): n for n, sealed in found.records.items()}
        state.in_shards[found.header.path] = {c: captures[c] for c in logged & captures.keys()}
        state.nameless[found.header.path] = {
            (sealed.row.moment, sealed.row.shape)
            for sealed in found.records.values()
            if sealed.row.client == UNKNOWN_CLIENT
        }
    series.row.stored_bytes += found.stored_nbytes
    series.row.sealed = series.in_shards = len(found.records)
    series.row.sealing = True  # its shape may not be published yet
    state.known[found.header.path] = len(found.records)
    state.catalog.write(state.out.rows, [series.row], {})
    state.out.rows.clear()


def _reconcile(state: Recovery) -> None:
    """Forget catalog rows of records that no file holds any more; what is lost is said, not pretended."""
    for series in state.series.values():
        held = series.in_shards + len(series.waiting)
        if series.row.records > held:
            lost = series.row.records - held
            logger.warning("%s: %d records of the catalog are in no file any more", series.header.path, lost)
            state.catalog.forget_from(series.row, held)
            state.lost = True


def _finish_seals(state: Recovery) -> None:
    """Renamed shards whose shape was not published: publish them now."""
    group = [series for series in state.series.values() if series.row.sealing]
    behind = [(series, series.in_shards) for series in group if series.shard is not None]
    for series in group:
        per_shard = series.geometry.shard_records
        newest = (series.row.records - 1) // per_shard
        for shard in range(series.row.sealed // per_shard, newest + 1):
            if (path := shard_path(state.layout.run, series.header, shard)).exists():
                state.layout.placed(path)
        series.row.sealing = False
        series.row.sealed = series.in_shards = records_on_disk(state.layout.run, series, newest)
    state.layout.sync()
    try:
        publish(state.layout, state.catalog, group)
    except (ValueError, LookupError, TypeError):  # metadata on disk that cannot be continued
        for series in group:
            _publish_anew(state, series)
    for series, in_shards in behind:  # an open shard goes on behind what was published
        series.in_shards = in_shards


def _publish_anew(state: Recovery, series: SeriesState) -> None:
    moments = state.layout.run / series.header.path / "moments"
    try:
        publish(state.layout, state.catalog, [series])
    except (ValueError, LookupError, TypeError) as error:
        set_aside(moments, state.quarantine, f"moments of {series.header.path}: {error}")
        publish(state.layout, state.catalog, [series])


def _clear_leftovers(spool: Path) -> None:
    """Files that a kill left half-written; the lock of the store root says that no writer is at work on them."""
    for path in spool.glob("*.tmp"):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            unlink(path, missing_ok=True)
    for path in spool.glob("*.new"):
        remove_tree(path)
