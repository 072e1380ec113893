"""The upkeep of the runs by the daemon's clock: notes dead ranks, saves their counters, seals quiet runs.

Nothing here waits for the disk.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.rank import RankSession
from capd.server.runs.run import Run
from capd.store.catalog.rows import SessionRow
from capd_client.protocol.counter_page import DropReason

__all__ = ["MAX_LOST", "SAVE_INTERVAL_S", "Upkeep", "log_end"]

logger = logging.getLogger(__name__)

# Ranks of one run that may come back. Each holds its arena and a handle of its process.
MAX_LOST = 256
# With the clock's tick, counters on disk are less than a second old.
SAVE_INTERVAL_S = 0.5


@dataclass(slots=True)
class _Saved:
    # The row that was last handed to the catalog.
    row: SessionRow | None = None
    at: float = -SAVE_INTERVAL_S
    future: Future[None] | None = None


class Upkeep:
    """The upkeep of each run, called by the clock. lock: the registry's; ranks come and go under it."""

    def __init__(self, pipeline: Pipeline, lock: threading.Lock, idle_seal_s: float) -> None:
        self._pipeline, self._lock, self._idle_seal_s = pipeline, lock, idle_seal_s
        self._saved: dict[bytes, _Saved] = {}

    def ranks(self, run: Run, now: float) -> None:
        """Note dead ranks, and persist changed counters."""
        lost = [rank for rank in list(run.ranks.values()) if rank.lost]
        lost.sort(key=lambda rank: rank.process.lost_at)
        for rank in lost[:-MAX_LOST]:
            rank.check_process(grace_s=0.0, return_s=0.0)
        for client, rank in list(run.ranks.items()):
            rank.check_process(grace_s=self._idle_seal_s)
            # At once: its memory counts for a container that may start again, and the rest may take seconds.
            # A connection may bring the rank back under this lock.
            with self._lock:
                if rank.at_rest:
                    rank.release_arena()
            # Asked first, so that the row that is then saved has the answer.
            end_is_open = rank.died and rank.process.end_may_follow
            if not self._save(rank, now) or end_is_open:
                continue
            with self._lock:
                if rank.at_rest:
                    run.finished[client] = rank.row()
                    run.why_full = rank.why_full or run.why_full
                    run.heed(rank)
                    del run.ranks[client]
                    self._saved.pop(client, None)
                    rank.release()
                    self._pipeline.forget(client)
                    log_end(rank, run.finished[client])

    def _save(self, rank: RankSession, now: float) -> bool:
        """Save the rank's counters if they changed. Return True if the catalog holds the current ones.

        A new save never starts before the last one is done. A failed save is logged and retried.
        """
        row, saved = rank.row(), self._saved.setdefault(rank.client, _Saved())
        if saved.future is not None:
            if not saved.future.done():
                return False
            error = saved.future.exception()
            saved.future = None
            if error is not None:
                logger.error("counters of rank %d could not be saved: %s; retrying", row.rank, error)
                saved.row = None
        if row == saved.row:
            return True
        if now - saved.at >= SAVE_INTERVAL_S:
            # Under the lock. Otherwise the row of a rank that was gone could follow the one of its return.
            with self._lock:
                saved.row, saved.at = rank.row(), now
                saved.future = self._pipeline.save_session(rank.run_id, saved.row)
        return False

    def seal(self, run: Run, now: float) -> None:
        """Seal the run when it has been quiet for long enough, and note when the seal is done."""
        if run.sealing is not None and run.sealing.done():
            error = run.sealing.exception()
            run.sealing = None
            if error is None:
                run.at_seal = run.at_sealing
                logger.info("run %s sealed, %d records", run.run_id, run.at_seal.records)
            else:
                run.quiet_since = now
                logger.error("run %s could not be sealed: %s; retrying", run.run_id, error)
        if run.arriving or any(rank.busy for rank in list(run.ranks.values())):
            run.quiet_since = now
        elif run.sealing is None and not run.sealed and now - run.quiet_since >= self._idle_seal_s:
            with self._lock:
                self.begin_seal(run, is_last=True)

    def begin_seal(self, run: Run, *, is_last: bool) -> Future[None]:
        """Seal the run now. The caller holds the lock. is_last: whether the ranks are quiet."""
        run.at_sealing = self._pipeline.run_stats(run.run_id)
        run.sealing = self._pipeline.seal(run.run_id, is_last=is_last)
        return run.sealing


def log_end(rank: RankSession, row: SessionRow) -> None:
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
