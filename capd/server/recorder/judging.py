"""The thread that gives the rules the statistics of held records, computed from the spool if the rank sent none."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import reduce
from typing import Protocol

from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.store.documents.names import series_path
from capd.store.format.frames import RecordRow, SeriesHeader, StatsRow
from capd.store.format.geometry import Geometry
from capd.store.format.statistics import merge

__all__ = ["MOST_WAITING", "HeldRecordsFeed", "Judges"]

logger = logging.getLogger(__name__)

MOST_WAITING = 16_384
"""The held records that wait for the rules."""

_GATHER = 256
# The pieces of large records that are in the encode pool together.
_TOGETHER_NBYTES = 32 << 20
_NO_GEOMETRY = Geometry((1,), (1,), 1, 1, 1)


class Judges(Protocol):
    """What takes records to the rules. It must neither block nor raise."""

    def offer(self, run_id: str, records: list[tuple[SeriesHeader, RecordRow]]) -> None:
        """Take records of a run, with their statistics."""

    def leave_out(self, count: int) -> None:
        """Count records that no rule will see."""


class HeldRecordsFeed(threading.Thread):
    """Feeds the rules. `put` never waits."""

    def __init__(self, pipeline: Pipeline, judges: Judges) -> None:
        super().__init__(name="capd-held-feed", daemon=True)
        self._pipeline, self.judges = pipeline, judges
        self._waiting: deque[RecordJob] = deque()
        self._wake = threading.Event()
        self._stopping = False

    def put(self, job: RecordJob) -> bool:
        """Take a held record. Return whether there was room for it. If not, the rules see it if it is kept."""
        if len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting.append(job)
        self._wake.set()
        return True

    def stop(self, timeout_s: float) -> None:
        """Feed what waits, and end."""
        self._stopping = True
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        """The thread's loop."""
        while not self._stopping or self._waiting:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                self._feed(self._batch())

    def _batch(self) -> list[RecordJob]:
        jobs: list[RecordJob] = []
        nbytes = 0
        while self._waiting and len(jobs) < _GATHER and nbytes < _TOGETHER_NBYTES:
            jobs.append(self._waiting.popleft())
            nbytes += jobs[-1].descriptor.nbytes
        return jobs

    def _feed(self, jobs: list[RecordJob]) -> None:
        started = []
        for job in jobs:
            try:
                pieces = [] if job.row is not None else self._pipeline.statistics_of(job)
            except RuntimeError:
                # The pool is closed.
                return
            started.append((job, pieces))
        for job, pieces in started:
            try:
                stats = job.known_statistics() or reduce(
                    merge, (piece.result() for piece in pieces), StatsRow()
                )
                self.judges.offer(job.run_id, [(_header(job), _row(job, stats))])
            except Exception as error:
                # This is the outermost loop of the thread. An iteration that left has no bytes any more.
                self.judges.leave_out(1)
                if not isinstance(error, OSError):
                    logger.exception("[window] a held record could not be judged")


def _header(job: RecordJob) -> SeriesHeader:
    define = job.define
    return SeriesHeader(
        series_path(define.key), define.key, define.dtype, "", _NO_GEOMETRY, define.attributes
    )


def _row(job: RecordJob, stats: StatsRow) -> RecordRow:
    descriptor = job.descriptor
    return RecordRow(
        job.client, job.sequence, descriptor.shape, descriptor.nbytes, descriptor.moment, descriptor.device,
        descriptor.requires_grad, descriptor.is_leaf, descriptor.metadata.decode(), "", stats,
    )  # fmt: skip
