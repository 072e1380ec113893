"""The snapshot that every scrape reads: the counters of the daemon at one moment.

The daemon's clock takes it, at most once a second. Scrapes only read the newest one. So neither a scrape nor a slow
reader touches a lock of the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from capd.server.connections.listener import Listener
from capd.server.lab.outcomes import LabCounters, LabFigures
from capd.server.limits import DiskBudget
from capd.server.pipeline.pipeline import Pipeline
from capd.server.rules.alert_counters import AlertCounters
from capd.server.runs.figures import RunFigures
from capd.server.runs.registry import Registry
from capd.store.upload.sending.figures import UploadCounters, UploadFigures

__all__ = ["MAX_RUNS_SHOWN", "Bucketed", "Collector", "Snapshot", "shown"]

# Runs of one snapshot.
MAX_RUNS_SHOWN = 64
# A run without ranks leaves so long after its last rank.
KEPT_S = 600.0
# The files of the logs are asked for their sizes.
_USED_INTERVAL_S = 5.0

Bucketed = tuple[list[int], float]
"""The count of each bucket of a histogram, and the sum in seconds."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the daemon at `taken` (monotonic). Sizes are in bytes.

    Attributes:
        oldest_s: The age of the oldest capture that arrived and is not committed; 0 without one.
        used_nbytes: The bytes that count against max_disk.
        encoders: The kernel's ids of the encode threads.
        refuses: The disk budget refused the newest record that asked it, in the last minute.
        omitted: The number of runs that are not in `runs`.
        uploads: The figures of the uploads; None without any.
        alerts: The counters of rules; None without any.
        lab: The figures of the lab; None without one.
    """

    taken: float
    connections: int
    refused_connections: dict[str, int]
    runs: list[RunFigures]
    omitted: int
    staged_nbytes: int
    staging_nbytes: int
    oldest_s: float
    commits: Bucketed
    syncs: Bucketed
    seals: Bucketed
    encoders: list[int]
    used_nbytes: int
    store_failed: bool
    refuses: bool
    uploads: UploadCounters | None = None
    alerts: AlertCounters | None = None
    lab: LabCounters | None = None


class Collector:
    """Takes snapshots. Only the daemon's clock calls it, because it needs the registry's lock for a moment."""

    def __init__(
        self,
        registry: Registry,
        pipeline: Pipeline,
        budget: DiskBudget,
        listener: Listener,
        *,
        each_rank: bool,
        uploads: UploadFigures | None = None,
        alerts: Callable[[], AlertCounters] | None = None,
        lab: LabFigures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._pipeline, self._budget, self._listener = registry, pipeline, budget, listener
        self._each_rank, self._uploads, self._clock = each_rank, uploads, clock
        self._alerts, self._lab = alerts, lab
        self._used_nbytes, self._used_at = 0, -_USED_INTERVAL_S
        # The most stored bytes of each run so far.
        self._stored: dict[str, int] = {}

    def take(self) -> Snapshot:
        """Return the state of this moment."""
        now = self._clock()
        runs = self._registry.figures(each_rank=self._each_rank)
        for run in runs:
            # A chunk that is written again may be smaller. A counter that goes down looks like a restart.
            run.stored_nbytes = max(run.stored_nbytes, self._stored.get(run.run_id, 0))
        self._stored = {run.run_id: run.stored_nbytes for run in runs}
        on_page = shown(runs, now)
        oldest = self._pipeline.oldest_since
        commits, syncs, seals = self._pipeline.durations
        if now - self._used_at >= _USED_INTERVAL_S:
            self._used_nbytes, self._used_at = self._budget.stored(), now
        return Snapshot(
            taken=now,
            connections=self._listener.connections,
            refused_connections=dict(self._listener.refused),
            runs=on_page,
            omitted=len(runs) - len(on_page),
            staged_nbytes=self._pipeline.staged_nbytes,
            staging_nbytes=self._pipeline.staging_nbytes,
            oldest_s=0.0 if oldest is None else max(0.0, now - oldest),
            commits=commits.read(),
            syncs=syncs.read(),
            seals=seals.read(),
            encoders=self._pipeline.encoders,
            used_nbytes=self._used_nbytes,
            store_failed=self._pipeline.failing,
            refuses=self._budget.refuses,
            uploads=None if self._uploads is None else self._uploads.read(),
            alerts=None if self._alerts is None else self._alerts(),
            lab=None if self._lab is None else self._lab.read(),
        )


def shown(runs: list[RunFigures], now: float) -> list[RunFigures]:
    """Return the runs for the page: without those that ended KEPT_S ago, at most MAX_RUNS_SHOWN.

    Args:
        runs: All runs, the newest last.
        now: The time (monotonic).

    Returns:
        The chosen runs in their order. Active ones go before quiet ones. Of active ones the
        newest go first, of quiet ones those that were left last.
    """
    recent = [run for run in runs if run.active or now - run.quiet_since < KEPT_S]

    def newness(place: int) -> tuple[bool, float, int]:
        # An old run that ranks have continued is as new as its last rank.
        run = recent[place]
        return run.active, 0.0 if run.active else run.quiet_since, place

    chosen = sorted(range(len(recent)), key=newness)[-MAX_RUNS_SHOWN:]
    return [recent[place] for place in sorted(chosen)]
