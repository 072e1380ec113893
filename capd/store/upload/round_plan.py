"""The plan of one round: the series that go up now, those that wait for the next one, and whether anything changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capd.errors import StoreError
from capd.store.catalog.rows import SeriesRow, SessionRow
from capd.store.documents.remote_state import RemoteState
from capd.store.segments.series_table import SeriesEntry
from capd.store.upload.local_files import KnownFiles
from capd.store.upload.plan import PlannedSeries, plan_series
from capd.store.upload.published_node import PublishedNode
from capd.store.upload.snapshot import CatalogSnapshot

__all__ = ["RoundPlan", "plan_round", "waiting_in"]

# The counters of live sessions alone are worth a new manifest this often.
_COUNTERS_S = 60.0


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round uploads.

    Attributes:
        series: The series of this round, changed or not.
        entries: The entries of changed series that wait for the next round, by path.
        sessions: The sessions of the catalog, and those that a lost catalog had.
        more: Whether series wait for the next round.
        is_complete: Whether the manifest will hold everything of a quiet run.
        nbytes: The bytes of all shards that wait, also of those for the next round.
        oldest_s: The time of the oldest of them, as seconds since 1970.
    """

    series: list[PlannedSeries]
    entries: dict[str, SeriesEntry]
    sessions: list[SessionRow]
    more: bool
    is_complete: bool
    nbytes: int
    oldest_s: float

    @property
    def known(self) -> dict[str, SeriesEntry]:
        """The entries by path whose records in the segments still are those of the catalog."""
        same = {
            one.row.header.path: one.before
            for one in self.series
            if one.before is not None and _continues(one.row, one.before)
        }
        return {**same, **self.entries}

    @property
    def rows(self) -> list[SeriesRow]:
        """The rows of all series of the new manifest, by id."""
        rows = [one.row for one in self.series] + [entry.row for entry in self.entries.values()]
        return sorted(rows, key=lambda row: row.id)

    def changes(self, remote: PublishedNode, attributes: Mapping[str, Any]) -> bool:
        """Return whether the object store lacks anything."""
        manifest = remote.manifest
        if manifest is None:
            return bool(self.series) or self.is_complete
        paths = {one.row.header.path for one in self.series} | self.entries.keys()
        return (
            any(one.is_changed for one in self.series)
            or remote.entries.keys() != paths
            or manifest.is_complete != self.is_complete
            or manifest.attributes != attributes
            or (self.is_complete and len(manifest.records) > 1)
            or _states(manifest.sessions) != _states(self.sessions)
            or (self.is_late(remote) and time.time_ns() - manifest.written_ns > _COUNTERS_S * 1e9)
        )

    def is_late(self, remote: PublishedNode) -> bool:
        """Return whether the counters in the object store are old."""
        return remote.manifest is not None and remote.manifest.sessions != self.sessions


def plan_round(
    run: Path,
    snapshot: CatalogSnapshot,
    remote: PublishedNode,
    known: KnownFiles,
    state: RemoteState,
    at_most: int | None,
) -> RoundPlan:
    """Return what the next round uploads.

    Args:
        run: The directory of the run.
        snapshot: The catalog.
        remote: What the object store has.
        known: The checksums of local files.
        state: The local state of the upload.
        at_most: After so many bytes further series wait. None: no limit.

    Raises:
        StoreError: The local store cannot be read.
        OSError: The local store cannot be read.
    """
    series: list[PlannedSeries] = []
    entries: dict[str, SeriesEntry] = {}
    taken = nbytes = 0
    more, oldest_s = False, time.time()
    _check_catalog(run, snapshot, remote)
    for row in snapshot.series:
        before = remote.entries.get(row.header.path)
        if not row.sealed and before is None and not snapshot.is_complete:
            continue
        planned = plan_series(run, row, before, known, state)
        nbytes += planned.nbytes
        oldest_s = min([oldest_s, *(shard.version.mtime_ns / 1e9 for shard in planned.shards)])
        old = planned.before
        if planned.is_changed and at_most is not None and taken >= at_most:
            more = True
            if old is not None and _continues(row, old):
                entries[row.header.path] = old
            continue
        taken += planned.nbytes
        series.append(planned)
    return RoundPlan(
        series,
        entries,
        _sessions(snapshot, remote),
        more,
        snapshot.is_complete and not more,
        nbytes,
        oldest_s,
    )


def waiting_in(
    run: Path, snapshot: CatalogSnapshot, known: KnownFiles, state: RemoteState
) -> tuple[int, float]:
    """Return the bytes of the shards that no manifest named so far, and the time of the oldest.

    This asks only the local files, because an object store may not answer for hours.
    """
    waiting = [
        shard.version
        for row in snapshot.series
        if row.sealed
        for shard in plan_series(run, row, None, known, state).shards
        if known.crc32c(shard.key, shard.version) is None
    ]
    oldest_s = min((version.mtime_ns / 1e9 for version in waiting), default=time.time())
    return sum(version.nbytes for version in waiting), oldest_s


def _continues(row: SeriesRow, before: SeriesEntry) -> bool:
    """Return whether the records of an entry are the first ones of the series in the catalog."""
    return before.row.id == row.id and before.row.records <= row.sealed


def _check_catalog(run: Path, snapshot: CatalogSnapshot, remote: PublishedNode) -> None:
    """Raise StoreError if a catalog that is being rebuilt lacks something that was published."""
    rows = {row.header.path: row for row in snapshot.series}
    for path, entry in remote.entries.items():
        row = rows.get(path)
        if (run / path / "zarr.json").exists() and (row is None or row.records < entry.row.records):
            raise StoreError(
                f"the catalog of {run} lacks records of {path} that were uploaded; if no daemon recovers the run now, "
                "`capd verify` says what is damaged",
                retry=True,
            )


def _sessions(snapshot: CatalogSnapshot, remote: PublishedNode) -> list[SessionRow]:
    """Return all sessions of the node. A catalog that was lost took its own with it: those here ended with it."""
    known = {session.client for session in snapshot.sessions}
    gone = [] if remote.manifest is None else [s for s in remote.manifest.sessions if s.client not in known]
    return [*(replace(s, state="died") if s.state == "live" else s for s in gone), *snapshot.sessions]


def _states(sessions: list[SessionRow]) -> dict[bytes, str]:
    return {session.client: session.state for session in sessions}
