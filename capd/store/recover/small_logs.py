"""Replays the small logs of the last daemon: records that are in no shard become pending again, in capture order.

A record is in a shard if its number is below the number of sealed records, or if a `.partial` holds its client and
sequence. If a new catalog was made from the sealed shards, numbers do not count: client and sequence decide, or the
moment if those are lost. A log that lost records or has outdated numbers is rewritten.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from capd.errors import StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.sums import series_of_record
from capd.store.disk.files import unlink
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.log_places import LOG_GLOB
from capd.store.recover.damaged_files import (
    LoggedSmall,
    copy_aside,
    is_the_files_fault,
    rewrite_log,
    set_aside,
)
from capd.store.recover.state import Recovery
from capd.store.scan.scan import ScannedLog, read_log
from capd.store.shards.series import SeriesState

__all__ = ["replay_logs"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sorted:
    """The records of a log, sorted by what becomes of them.

    pending: the records that no shard holds. spare: records that a `.partial` holds, too, under their numbers there.
    lost: the names of lost records. renumbered: whether some records have outdated numbers in the log.
    """

    pending: list[tuple[SeriesState, LoggedSmall]] = field(default_factory=list)
    spare: list[LoggedSmall] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    renumbered: bool = False


def replay_logs(state: Recovery) -> None:
    """Make the records of all logs pending in their series."""
    for path in sorted(state.layout.spool.glob(LOG_GLOB)):
        try:
            log = read_log(path, check=True)
        except OSError as error:
            if not is_the_files_fault(error, path):
                raise
            set_aside(path, state.quarantine, str(error))
            continue
        if log is None:
            set_aside(path, state.quarantine, "it is not a small log")
        elif foreign := state.foreign(log.file):
            set_aside(path, state.quarantine, foreign)
        else:
            _replay(state, path, log)


def _replay(state: Recovery, path: Path, log: ScannedLog) -> None:
    found = _sort(state, log)
    damaged = bool(found.lost) or any(start < log.end for start, _ in log.gaps)
    if damaged:
        logger.warning(
            "%s is damaged (a copy is kept in %s); lost records: %s",
            path, state.quarantine, ", ".join(found.lost) or "none known",
        )  # fmt: skip
        copy_aside(path, state.quarantine)
    if not found.pending:
        unlink(path)
        return
    places = [small.place for _, small in found.pending]
    if damaged or found.renumbered:
        places = rewrite_log(state, path, [small for _, small in found.pending] + found.spare)
    waiting_rows: dict[str, dict[int, RecordRow]] = {}
    for series, waiting in found.pending:
        waiting_rows.setdefault(series.header.path, {})[waiting.number] = waiting.row
    stored = {path: state.agree(state.series[path], rows) for path, rows in waiting_rows.items()}
    # The places of the spare records follow those of the pending ones.
    for (series, waiting), place in zip(found.pending, places, strict=False):
        # The bytes in a shard that lost the record.
        counted = stored[series.header.path].get(waiting.number, 0)
        if waiting.number >= state.known.get(series.header.path, 0) or counted:
            series.row.stored_bytes -= counted
            state.add(series, waiting.number, waiting.row, 0)
        state.acknowledge(waiting.row)
        series.waiting.append(place)


def _sort(state: Recovery, log: ScannedLog) -> _Sorted:
    found = _Sorted()
    counts: Counter[str] = Counter()
    headers = _headers_of_orphans(state, log)
    for logged in log.records:
        header = logged.header or headers.get(logged.reference)
        if header is None:
            found.lost.append(f"sequence {logged.row.sequence} of an unknown series")
            continue
        series = state.series_of(header)
        held = state.in_shards.get(header.path, {})
        capture = (logged.row.client, logged.row.sequence)
        nameless = state.nameless.get(header.path)
        if nameless is None:
            is_sealed = logged.record < series.row.sealed
        else:
            is_sealed = (logged.row.moment, logged.row.shape) in nameless
        if is_sealed or capture in held or capture in state.in_logs:
            if held.get(capture, -1) >= series.row.sealed and logged.is_sound:
                found.spare.append(LoggedSmall(header, held[capture], logged.row, logged.place))
                found.renumbered |= held[capture] != logged.record
        elif not logged.is_sound:
            found.lost.append(f"{header.path}#{logged.record}")
        else:
            number = series.in_shards + len(series.waiting) + counts[header.path]
            counts[header.path] += 1
            found.renumbered |= number != logged.record or logged.header is None
            state.in_logs.add(capture)
            found.pending.append((series, LoggedSmall(header, number, logged.row, logged.place)))
    return found


def _headers_of_orphans(state: Recovery, log: ScannedLog) -> dict[int, SeriesHeader]:
    """Return the series of records whose SERIES frame is lost, by reference, if the catalog knows one of them."""
    orphans = [logged for logged in log.records if logged.header is None]
    if not orphans:
        return {}
    by_id = {series.row.id: series.header for series in state.series.values()}
    found: dict[int, SeriesHeader] = {}
    try:
        database = connect_read_only(state.catalog.path)
    except StoreError:
        return {}
    try:
        for logged in orphans:
            if logged.reference not in found:
                identity = series_of_record(database, logged.row.client, logged.row.sequence)
                if identity in by_id:
                    found[logged.reference] = by_id[identity]
    finally:
        database.close()
    return found
