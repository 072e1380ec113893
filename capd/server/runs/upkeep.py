"""The upkeep of the runs by the daemon's clock: notes dead ranks, keeps their counters, seals quiet runs.

Nothing here waits for the disk.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.rank import RankSession
from capd.server.runs.persist import RowKeeper
from capd.server.runs.run import Run
from capd.store.catalog.rows import SessionRow
from capd_client.protocol.counter_page import DropReason

__all__ = ["MAX_LOST", "Tending", "tell_end"]

logger = logging.getLogger(__name__)

# Ranks of one run that may come back. Each holds its arena and a handle of its process.
MAX_LOST = 256


class Tending:
    """The upkeep of each run, called by the clock. lock: the registry's; ranks come and go under it."""

    def __init__(self, pipeline: Pipeline, lock: threading.Lock, idle_seal_s: float) -> None:
        self._pipeline, self._lock, self._idle_seal_s = pipeline, lock, idle_seal_s
        self._keeper = RowKeeper(pipeline)

    def ranks(self, run: Run, now: float) -> None:
        """Note dead ranks, and persist changed counters."""
        lost = [rank for rank in list(run.ranks.values()) if rank.lost]
        lost.sort(key=lambda rank: rank.process.lost_at)
        for rank in lost[:-MAX_LOST]:
            rank.check_process(grace_s=0.0, return_s=0.0)
        for client, rank in list(run.ranks.items()):
            rank.check_process(grace_s=self._idle_seal_s)
            # Asked first, so that the row that is then saved has the answer.
            end_is_open = rank.died and rank.process.may_tell
            if not self._keeper.update(rank, now) or end_is_open:
                continue
            # A connection may bring the rank back under this lock.
            with self._lock:
                if rank.at_rest:
                    run.finished[client] = rank.row()
                    run.why_full = rank.why_full or run.why_full
                    del run.ranks[client]
                    self._keeper.forget(rank)
                    rank.release()
                    self._pipeline.forget(client)
                    tell_end(rank, run.finished[client])

    def seal(self, run: Run, now: float) -> None:
        """Seal the run when it has been quiet for long enough, and note when the seal is done."""
        if run.sealing is not None and run.sealing.done():
            error = run.sealing.exception()
            run.sealing = None
            if error is None:
                run.sealed_records = run.sealing_records
                logger.info("run %s sealed, %d records", run.run_id, run.sealed_records)
            else:
                run.quiet_since = now
                logger.error("run %s could not be sealed: %s; retrying", run.run_id, error)
        if run.arriving or any(rank.busy for rank in list(run.ranks.values())):
            run.quiet_since = now
        elif run.sealing is None and not run.sealed and now - run.quiet_since >= self._idle_seal_s:
            with self._lock:
                self.begin_seal(run)

    def begin_seal(self, run: Run) -> Future[None]:
        """Seal the run now. The caller holds the lock."""
        run.sealing_records = self._pipeline.run_stats(run.run_id).records
        run.sealing = self._pipeline.seal(run.run_id)
        return run.sealing


def tell_end(rank: RankSession, row: SessionRow) -> None:
    """Log one line for a rank that is gone for good."""
    if not rank.died:
        logger.info("rank %d of run %s %s", row.rank, rank.run_id, row.state)
        return
    logger.info(
        "rank %d of run %s ended without saying goodbye%s; %d captures were recovered from its arena, %d were "
        "incomplete there and are lost",
        row.rank,
        rank.run_id,
        row.end and f" ({row.end})",
        rank.recovered,
        row.dropped.get(DropReason.RANK_DIED.value, 0),
    )
