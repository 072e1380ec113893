"""Opens one node's part of a run after any end of the last daemon: makes catalog, spool and shards consistent.

The catalog may lack the rows of the last batch, so `.partial` files and small logs are replayed. A missing or damaged
catalog is rebuilt from all frames. A `.partial` is cut after its last COMMIT. A seal that was interrupted between
rename and catalog mark is published again.

Damage in the spool costs only the damaged records. A run always opens:

- A `.partial` that lost a COMMIT in its middle is rewritten without that record (`capd.store.recover.mend`). So is a
  log that lost a record.
- An unreadable file moves to the quarantine with a warning. So does a file of another run, node or place.
- Elements in a `.partial` are checked here only after a loss of power (`capd.store.disk.power`). Otherwise a reader or
  `capd verify` finds their damage.
- Published records keep their numbers. A new catalog may find no row for one of them: that record is listed and cannot
  be read. `capd verify RUN --repair -o NEW` makes a run without it.

Every step can be interrupted and repeated.
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

# The errors of reading a catalog with damaged pages or values. The errors of msgspec are ValueErrors.
_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError)


def open_node(
    layout: Layout,
    files: OpenFiles,
    *,
    catalog_name: str = CATALOG_NAME,
    headers: Mapping[str, SeriesHeader] | None = None,
) -> Recovered:
    """Bring one node's part of the run to a consistent state.

    Args:
        layout: The layout of the run and its node.
        files: The open files of the store.
        catalog_name: The name of the catalog file in the node's directory. A missing file is created.
        headers: The headers of series by path, for series that no file describes.

    Raises:
        StoreFull: The disk is full.
        StoreError: The disk does not allow the recovery.
    """
    place = CatalogPlace(node_directory(layout.run, layout.node), catalog_name)
    catalog = place.published
    try:
        place.fetch()
        try:
            return _open(layout, files, place, headers or {})
        except _DAMAGED as error:
            # A temporary error is already a StoreError here.
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
        set_aside(path, path.parent / "quarantine", "it is a directory in the place of the catalog")
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
                "%s: no file describes the records %s; `capd verify %s --repair -o NEW` makes a run without them",
                found.header.path, found.lost, state.layout.run,
            )  # fmt: skip
            found.keep_numbers()
        _add_sealed(state, found, logged)


def _headers_and_captures(state: Recovery) -> tuple[dict[str, SeriesHeader], set[tuple[bytes, int]]]:
    """Return the series that the spool's files name, by path, and client and sequence of each logged record."""
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
    """Read the rows of records whose COMMIT is lost from the `.partial` that continues their shard."""
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
    # The shape of the series may not be published yet.
    series.row.sealing = True
    state.known[found.header.path] = len(found.records)
    state.catalog.write(state.out.rows, [series.row], {})
    state.out.rows.clear()


def _reconcile(state: Recovery) -> None:
    """Remove the catalog rows of records that no file holds any more, and log the loss."""
    for series in state.series.values():
        held = series.in_shards + len(series.waiting)
        if series.row.records > held:
            lost = series.row.records - held
            logger.warning("%s: %d records of the catalog are in no file any more", series.header.path, lost)
            state.catalog.forget_from(series.row, held)
            state.lost = True


def _finish_seals(state: Recovery) -> None:
    """Publish renamed shards whose shape was not published."""
    group = [series for series in state.series.values() if series.row.sealing]
    still_open = [(series, series.in_shards) for series in group if series.shard is not None]
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
    except (ValueError, LookupError, TypeError):
        # Damaged metadata on disk cannot be continued.
        for series in group:
            _publish_apart(state, series)
    for series, in_shards in still_open:
        # An open shard continues after the published records.
        series.in_shards = in_shards


def _publish_apart(state: Recovery, series: SeriesState) -> None:
    moments = state.layout.run / series.header.path / "moments"
    try:
        publish(state.layout, state.catalog, [series])
    except (ValueError, LookupError, TypeError) as error:
        set_aside(moments, state.quarantine, f"moments of {series.header.path}: {error}")
        publish(state.layout, state.catalog, [series])


def _clear_leftovers(spool: Path) -> None:
    """Remove files that a kill left half-written. The lock of the store root proves that nobody writes them now."""
    for path in spool.glob("*.tmp"):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            unlink(path, missing_ok=True)
    for path in spool.glob("*.new"):
        remove_tree(path)
