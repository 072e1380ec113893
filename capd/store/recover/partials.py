"""Recovers the `.partial` files of the last daemon: replays, cuts after the last COMMIT, repairs or sets aside."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from capd.errors import DamagedRecord
from capd.store.disk.files import truncate, unlink
from capd.store.disk.layout import PARTIAL_GLOB, by_digest, named, partial_path, shard_path
from capd.store.format.frames import UNKNOWN_CLIENT, SeriesHeader, sound_end
from capd.store.format.sharding_index import read_index
from capd.store.recover.damaged_files import copy_aside, is_the_files_fault, rewrite_partial, set_aside
from capd.store.recover.state import Recovery
from capd.store.scan.scan import CommitRun, ScannedShard, scan_shard
from capd.store.shards.series import SeriesState
from capd.store.shards.writer import ShardWriter

__all__ = ["records_on_disk", "recover_partials"]

logger = logging.getLogger(__name__)


def recover_partials(state: Recovery) -> None:
    """Replay, cut, repair or set aside every `.partial`."""
    digests = by_digest(series.header for series in state.series.values())
    for path in sorted(state.layout.spool.glob(PARTIAL_GLOB)):
        try:
            problem = _read_partial(state, path, named(path, digests))
        except DamagedRecord as error:
            problem = str(error)
        except OSError as error:
            if not is_the_files_fault(error, path):
                raise
            problem = str(error)
        if problem:
            set_aside(path, state.quarantine, problem)


def _read_partial(
    state: Recovery, path: Path, known: tuple[SeriesHeader, int] | None, *, repaired: bool = False
) -> str:
    """Recover one file. Return why it cannot be used, or ""."""
    scanned = scan_shard(path, known)
    if scanned is None or path.is_symlink():
        return "it does not begin with an intact header"
    header, file = scanned.header, scanned.file
    if foreign := state.foreign(file):
        return foreign
    if partial_path(state.layout.spool, header.path, scanned.shard) != path:
        return f"it is shard {scanned.shard} of {header.path}, under a wrong name"
    series = state.series_of(header)
    sealed = series.row.sealed
    if series.row.sealing:
        # A loss of power may remove the catalog mark of that seal, but not the shard under its name.
        sealed = records_on_disk(state.layout.run, series, scanned.shard)
    if (
        not header.geometry.is_small
        and not repaired
        and state.known.get(header.path, 0) > max(scanned.newest + 1, sealed)
    ):
        # The catalog knew more records: the end of the file is damaged, not just unfinished.
        copy_aside(path, state.quarantine)
    if _has_others(state, series, scanned, sealed):
        return "its records differ from the sealed records of the same numbers"
    if scanned.newest < sealed:
        # The file is new and empty, or torn, or a copy of a sealed shard without new records.
        unlink(path)
        return ""
    begin = scanned.shard * header.geometry.shard_records
    series.row.sealed = sealed
    if series.row.sealed < begin:
        return f"its records begin at {begin}, but only {series.row.sealed} are sealed before it"
    holes = any(number not in scanned.rows for number in range(series.row.sealed, scanned.newest + 1))
    gaps = any(start < scanned.end for start, _ in scanned.gaps)
    if holes or gaps or (state.may_be_torn and not repaired and _is_torn(path, scanned)):
        try:
            lost = rewrite_partial(state, path, header, scanned.shard)
            logger.warning(
                "%s: %s is damaged and was rewritten (a copy of the damaged file is in %s); it lost the records %s",
                header.path, path.name, state.quarantine, lost,
            )  # fmt: skip
            return _read_partial(state, path, known, repaired=True)
        except DamagedRecord:
            # Without holes all COMMITs that matter are there: the file is used as it is.
            if holes:
                raise
    truncate(path, scanned.end)
    _continue(state, path, scanned, series)
    return ""


def _has_others(state: Recovery, series: SeriesState, scanned: ScannedShard, sealed: int) -> bool:
    """Return whether it holds other captures than the sealed shards under the same numbers, which were renumbered."""
    known = state.catalog.stored(series.row.id, min(scanned.rows, default=0), sealed)
    return any(
        number in known
        and UNKNOWN_CLIENT not in (row.client, known[number][0])
        and known[number][:2] != (row.client, row.sequence)
        for number, row in scanned.rows.items()
    )


def _is_torn(path: Path, scanned: ScannedShard) -> bool:
    """Return whether a frame fails its checksum. Reads the whole file, hence only used after a loss of power."""
    with path.open("rb", buffering=0) as file:
        return sound_end(file.fileno(), scanned.end) < scanned.end


def _continue(state: Recovery, path: Path, scanned: ScannedShard, series: SeriesState) -> None:
    geometry = series.geometry
    sealed = shard_path(state.layout.run, series.header, scanned.shard)
    index = scanned.index
    if sealed.is_file():
        index = _sealed_index(sealed, geometry.shard_slots) | scanned.covering(series.row.sealed)
    stored = state.agree(series, {n: row for n, row in scanned.rows.items() if n >= series.row.sealed})
    for run in scanned.runs:
        _add_run(state, series, run, stored)
    if geometry.is_small:
        held = {(row.client, row.sequence): number for number, row in scanned.rows.items()}
        state.in_shards.setdefault(series.header.path, {}).update(held)
    series.in_shards = scanned.newest + 1
    series.shard = ShardWriter(
        path,
        state.files,
        scanned.shard,
        scanned.end,
        index,
        has_records=True,
        replaces=sealed.exists(),
        replaced_nbytes=scanned.replaced_nbytes,
    )
    series.row.sealing = False
    if series.is_full:
        state.out.unfinished.append(series)


def _add_run(state: Recovery, series: SeriesState, run: CommitRun, stored: Mapping[int, int]) -> None:
    """Add the records of one COMMIT.

    stored: the bytes in the catalog by record number; 0 for a record that was pending in the small log.
    """
    new = 0
    for number, row in enumerate(run.commit.rows, run.commit.first):
        if number >= series.row.sealed and not stored.get(number):
            state.add(series, number, row, run.share)
            new += 1
        state.acknowledge(row)
    series.row.stored_bytes += run.end - run.start if new == len(run.commit.rows) else new * run.share


def _sealed_index(path: Path, slots: int) -> dict[int, tuple[int, int]]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_index(fd, slots)
    except DamagedRecord as error:
        logger.warning("%s: %s", path, error)
        return {}
    finally:
        os.close(fd)


def records_on_disk(run: Path, series: SeriesState, newest: int) -> int:
    """Return the number of records in sealed shards up to shard `newest`, as their journals count them.

    The number is never below the number of published records.
    """
    for shard in range(newest, -1, -1):
        path = shard_path(run, series.header, shard)
        if (
            path.is_file()
            and (scanned := scan_shard(path, (series.header, shard))) is not None
            and scanned.runs
        ):
            return max(series.row.sealed, scanned.newest + 1)
    return series.row.sealed
