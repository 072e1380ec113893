"""Opens one node's part of a run after any end of the last daemon: makes catalog, spool and shards consistent.

The catalog may lack the rows of the last batch, so `.partial` files and small logs are replayed. A missing or damaged
catalog is rebuilt from all frames. A `.partial` is cut after its last COMMIT. A seal that was interrupted between
rename and catalog mark is published again.

Damage in the spool costs only the damaged records. A run always opens:

- A `.partial` that lost a COMMIT in its middle is rewritten without that record. So is a log that lost a record
  (`capd.store.recover.damaged_files`).
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from capd.errors import StoreError, StoreFull
from capd.space import if_full
from capd.store.catalog.place import CatalogPlace
from capd.store.catalog.writer import Catalog
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import remove_tree, unlink
from capd.store.disk.layout import Layout, node_directory, shard_path
from capd.store.disk.open_files import OpenFiles
from capd.store.format.frames import UNKNOWN_CLIENT, SeriesHeader
from capd.store.format.log_places import LOG_GLOB
from capd.store.recover.damaged_files import set_aside
from capd.store.recover.partials import records_on_disk, recover_partials
from capd.store.recover.series_tree import beyond_catalog, restore_documents
from capd.store.recover.small_logs import replay_logs
from capd.store.recover.state import Recovered, Recovery
from capd.store.scan.survey import SurveyedSeries, log_if_readable, survey
from capd.store.shards.seal import publish
from capd.store.shards.series import SeriesState

__all__ = ["Recovered", "open_node"]

logger = logging.getLogger(__name__)

Complete: TypeAlias = Callable[[SurveyedSeries], None]
# The errors of reading a catalog with damaged pages or values. The errors of msgspec are ValueErrors.
_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError)


def open_node(
    layout: Layout,
    files: OpenFiles,
    *,
    rebuild: Mapping[str, SeriesHeader] | None = None,
    complete: Complete = lambda _: None,
) -> Recovered:
    """Bring one node's part of the run to a consistent state.

    Args:
        layout: The run's directories and documents.
        files: The run's open files.
        rebuild: Rebuild the catalog from the frames. It holds the headers of series that no file describes.
        complete: Completes the rows of series whose shards were moved, if a catalog is built from the frames.

    Raises:
        StoreFull: The disk is full.
        StoreError: The disk does not allow the recovery.
    """
    place = CatalogPlace(node_directory(layout.run, layout.node))
    catalog = place.published
    try:
        place.fetch()
        try:
            return _open(layout, files, place, rebuild, complete)
        except _DAMAGED as error:
            # A temporary error is already a StoreError here.
            logger.warning("%s is damaged (%s): rebuilding it from the shard files", catalog, error)
            set_aside(catalog, catalog.parent / "quarantine", str(error))
            for suffix in ("-wal", "-shm"):
                unlink(catalog.with_name(catalog.name + suffix), missing_ok=True)
            place.fetch()
            return _open(layout, files, place, rebuild, complete)
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
    rebuild: Mapping[str, SeriesHeader] | None,
    complete: Complete,
) -> Recovered:
    path = place.published
    if path.is_dir():
        set_aside(path, path.parent / "quarantine", "it is a directory in the place of the catalog")
    catalog = Catalog(place.live, place if place.is_apart else None)
    try:
        _clear_leftovers(layout.spool)
        if rebuild is not None:
            catalog.mark_incomplete()
        state = Recovery(layout, files, catalog, rebuild or {})
        if not (state.fresh or catalog.was_closed) and (series := beyond_catalog(state)):
            logger.warning("%s lacks sealed records of %s: rebuilding it from the shard files", path, series)
            catalog.mark_incomplete()
            state = Recovery(layout, files, catalog, {})
        if state.fresh:
            _read_sealed(state, complete)
        recover_partials(state)
        failpoint("recover.after_partials")
        state.write()
        if state.may_be_torn:
            restore_documents(state)
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


def _read_sealed(state: Recovery, complete: Complete) -> None:
    logged: set[tuple[bytes, int]] = set()
    for path in state.layout.spool.glob(LOG_GLOB):
        log = log_if_readable(path)
        logged.update((record.row.client, record.row.sequence) for record in (log.records if log else ()))
    for found in survey(state.layout.run, state.layout.node, state.headers):
        if found.lost:
            logger.warning(
                "%s: no file describes the records %s; `capd verify %s --repair -o NEW` makes a run without them",
                found.header.path, found.lost, state.layout.run,
            )  # fmt: skip
            found.keep_numbers()
        if found.moved:
            complete(found)
        _add_sealed(state, found, logged)


def _add_sealed(state: Recovery, found: SurveyedSeries, logged: set[tuple[bytes, int]]) -> None:
    series = state.series_of(found.header)
    for number, row in sorted(found.rows.items()):
        state.add(series, number, row, found.shares.get(number, 0))
    if found.header.geometry.is_small:
        captures = {(row.client, row.sequence): n for n, row in found.rows.items()}
        state.in_shards[found.header.path] = {c: captures[c] for c in logged & captures.keys()}
        state.nameless[found.header.path] = {
            (row.moment, row.shape) for row in found.rows.values() if row.client == UNKNOWN_CLIENT
        }
    series.row.stored_bytes += found.stored_nbytes
    series.row.sealed = series.in_shards = len(found.rows)
    # The shape of the series may not be published yet.
    series.row.sealing = True
    state.known[found.header.path] = len(found.rows)
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
