"""The upkeep of the runs by the daemon's clock: notes dead ranks, saves their counters, seals quiet runs.

Nothing here waits for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from capd.server.pipeline.pipeline import Pipeline
from capd.server.process import RETURN_S
from capd.server.rank.accounting import settled
from capd.server.rank.rank import RankSession
from capd.server.recorder.recorder import Recorder
from capd.server.runs.run import Run
from capd.store.catalog.processes import is_running
from capd.store.catalog.rows import SessionRow
from capd.store.format.ranges import RangeSet
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

    def ranks(self, run: Run, now: float, recorder: Recorder | None = None) -> None:
        """Note dead ranks, and persist changed counters. recorder: hears of a death before the rank goes."""
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
            is_unheard = recorder is not None and rank.died and client not in run.mourned
            if not self._save(rank, now) or end_is_open or is_unheard:
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
                    if recorder is not None:
                        recorder.forget(run.run_id, client)
                        run.mourned.discard(client)
                    log_end(rank, run.finished[client])

    def window(self, recorder: Recorder, run: Run, now: float) -> None:
        """Tell the recorder how far the ranks are, keep what led to a death, and settle ranks that do not come back."""
        begun: dict[int, int] = {}
        waiting = self._absent(recorder, run, now)
        for client, rank in list(run.ranks.items()):
            attempt = rank.hello.attempt + rank.shift
            if rank.alive or (rank.session.in_work and not rank.died):
                # A rank that has left may have captures in the lanes.
                reached = rank.reached
                begun[attempt] = min(begun.get(attempt, reached), reached)
                run.mourned.discard(client)
            elif not rank.died or client in run.mourned:
                continue
            elif rank.session.in_work:
                # Its last captures are on their way to the recorder.
                waiting.add(attempt)
            else:
                run.mourned.add(client)
                end = f" ({rank.process.end})" if rank.process.end else ""
                reason = f"rank {rank.hello.rank} died{end}"
                _mourn(recorder, run, attempt, rank.last_iteration, reason)
        recorder.look(run.run_id, begun, waiting)
        run.holds = recorder.holds(run.run_id)

    def _absent(self, recorder: Recorder, run: Run, now: float) -> set[int]:
        """Return the attempts of ranks that may come back after a restart of the daemon. Settle those that will not."""
        waiting = set()
        for client, row in list(run.finished.items()):
            if row.clean or client in run.ranks:
                continue
            since = run.absent_since.setdefault(client, now)
            if row.state == "live" and is_running(row) is not False and now - since < RETURN_S:
                waiting.add(row.attempt)
                continue
            if row.state != "ended" and client not in run.mourned:
                run.mourned.add(client)
                _mourn(recorder, run, row.attempt, None, f"rank {row.rank} died while no daemon ran")
            let_go = recorder.final_account(run.run_id, client)
            if let_go is not None:
                self._settle(recorder, run, row, let_go)
        return waiting

    def _settle(
        self, recorder: Recorder, run: Run, row: SessionRow, let_go: Mapping[DropReason, int]
    ) -> None:
        """Write the final row of a rank that does not come back."""
        client = row.client
        with self._lock:
            if client in run.ranks:
                return
            committed = len(RangeSet(self._pipeline.committed(run.run_id, client)))
            state = "died" if row.state == "live" else row.state
            ended_ns = row.ended_ns or time.time_ns()
            final = settled(replace(row, state=state, ended_ns=ended_ns), committed, let_go)
            run.finished[client] = final
            self._pipeline.save_session(run.run_id, final)
            run.absent_since.pop(client, None)
            run.mourned.discard(client)
            recorder.forget(run.run_id, client)

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
                run.at_seal, run.sealed_at = run.at_sealing, now
                logger.info("run %s sealed, %d records", run.run_id, run.at_seal.records)
            else:
                run.quiet_since = now
                logger.error("run %s could not be sealed: %s; retrying", run.run_id, error)
        if run.arriving or run.holds or any(rank.busy for rank in list(run.ranks.values())):
            run.quiet_since = now
        elif run.sealing is None and not run.sealed and now - run.restful_since >= self._idle_seal_s:
            with self._lock:
                self.begin_seal(run, is_last=True)

    def begin_seal(self, run: Run, *, is_last: bool) -> Future[None]:
        """Seal the run now. The caller holds the lock. is_last: whether the ranks are quiet."""
        run.at_sealing = self._pipeline.run_stats(run.run_id)
        run.sealing = self._pipeline.seal(run.run_id, is_last=is_last)
        return run.sealing


def _mourn(recorder: Recorder, run: Run, attempt: int, iteration: int | None, reason: str) -> None:
    """Keep what led to the death of a rank, or log why not."""
    problem = recorder.keep(run.run_id, iteration, reason, attempt=attempt, is_last=True)
    if problem:
        logger.info("run %s: %s; nothing is kept: %s", run.run_id, reason, problem)


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
