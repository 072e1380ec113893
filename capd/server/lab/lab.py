"""The thread of the lab. Sampled records are copied, measured in a process of low priority, and stored as rows.

    dispatch thread → take (copy) ── record committed ──► queue → lab thread ⇄ process → append thread (rows)

The rank has its answer before a copy enters the queue. Copies take a fixed part of the staging memory, and the process
a fixed share of one CPU. A record that finds no room is counted, and is captured like every other record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from capd.config import DaemonSettings
from capd.lab.messages import MeasureOrder
from capd.lab.sampling import is_in_sample, is_source, parse_sample
from capd.metrics import LabStats
from capd.server.lab.budget import CpuBudget, FairShare, MeasuringCost
from capd.server.lab.copies import CopyMemory, RecordCopy
from capd.server.lab.error_writer import ErrorWriter, OnStored, Post
from capd.server.lab.measuring_process import MeasuringLost, MeasuringProcess
from capd.server.lab.outcomes import LabFigures
from capd.server.limits import DiskBudget
from capd.server.pipeline.jobs import RecordJob
from capd.server.recorder.segment import HeldBytes
from capd_client.arena.allocator import Slot

__all__ = ["Lab"]

logger = logging.getLogger(__name__)

_LEAST_NBYTES, _MOST_NBYTES = 512 << 10, 128 << 20
# Rows that are written together, and how long the first of them may wait.
_MOST_ROWS = 32
_ROWS_WAIT_S = 0.3
# Between two looks whether the daemon still has records of ranks in work.
_BUSY_LOOK_S = 0.01
# The last rows, at the end.
_WRITTEN_S = 5.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 300.0


class Lab(threading.Thread):
    """The lab of a daemon. `take` belongs to the dispatch thread; any thread may ask for the figures."""

    def __init__(
        self,
        settings: DaemonSettings,
        staging_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reserve memory for copies: up to half of the daemon's staging memory, at most 128 MiB."""
        super().__init__(name="capd-lab", daemon=True)
        self._formats, self._sample, self._share = (
            settings.lab_formats,
            settings.lab_sample,
            settings.lab_cpu,
        )
        self._of, self._clock = parse_sample(settings.lab_sample), clock
        self.memory = CopyMemory(max(_LEAST_NBYTES, min(_MOST_NBYTES, staging_nbytes // 2)))
        self.figures = LabFigures()
        self._changed = threading.Condition()
        self._queue: deque[RecordCopy] = deque()
        self._budget, self._fair = CpuBudget(self._share, clock), FairShare(self._share, clock)
        self._cost = MeasuringCost(len(self._formats))
        self._process: MeasuringProcess | None = None
        self._failures, self._next_start = 0, 0.0
        # The start of the first process is free. Those that follow it take from the share.
        self._has_measured = False
        self._problem = ""
        self._writer: ErrorWriter | None = None
        self._is_busy: Callable[[], bool] = lambda: False
        self._rows: dict[str, list[tuple[RecordCopy, bytes]]] = {}
        self._rows_since = 0.0
        # Until when (of the clock) the thread goes on after it was asked to stop.
        self._until: float | None = None

    # For other threads

    def begin(
        self,
        post: Post,
        budget: DiskBudget,
        on_stored: OnStored | None = None,
        *,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the thread.

        Args:
            post: Has the append thread do something with a run's store.
            budget: The disk budget of the pipeline.
            on_stored: Is told of stored rows.
            is_busy: Whether some rank waits for an acknowledgement. It must not wait.
        """
        self._is_busy = is_busy
        attributes = {"sample": self._sample, "formats": list(self._formats)}
        self._writer = ErrorWriter(attributes, len(self._formats), post, budget, self.figures, on_stored)
        logger.info(
            "[lab] errors of %s on %s of all calls, with %g %% of a CPU and %d MiB for copies",
            ", ".join(self._formats), self._sample, 100 * self._share, self.memory.nbytes >> 20,
        )  # fmt: skip
        self.start()

    def take(self, job: RecordJob) -> RecordCopy | None:
        """Copy a record if it is to be measured. Never waits. A reason against it is counted."""
        define, descriptor = job.define, job.descriptor
        moment = descriptor.moment
        if not is_in_sample(moment, self._of) or not is_source(define.key, define.dtype, define.attributes):
            return None
        reason = self._reason_against(job)
        if reason is None:
            slot = self.memory.take(descriptor.nbytes)
            reason = "memory" if slot is None else self._fill(slot, job)
        if reason is not None or slot is None:
            self.figures.count(reason or "memory")
            return None
        return RecordCopy(
            job.run_id, job.client, job.sequence, define, moment, descriptor.shape, descriptor.nbytes, slot,
            self._settled,
        )  # fmt: skip

    def _reason_against(self, job: RecordJob) -> str | None:
        """Return why a record of the sample is not measured, whatever memory is free; None if it may be."""
        key, moment, nbytes = job.define.key, job.descriptor.moment, job.descriptor.nbytes
        # A whole record that came in parts is in a file, and reading it would take too long here. A record that the
        # flight recorder keeps was read a moment ago.
        if job.descriptor.part is not None or not isinstance(job.data, memoryview | HeldBytes):
            return "in_parts"
        if not nbytes and 0 not in job.descriptor.shape:
            return "no_elements"
        if nbytes > self.memory.nbytes:
            return "too_large"
        call = (job.client, key.module, key.layer, moment.iteration, moment.micro_batch, moment.call)
        return None if self._fair.admits(call, self._cost.of(nbytes)) else "budget"

    def _fill(self, slot: Slot, job: RecordJob) -> str | None:
        try:
            self.memory.fill(slot, job)
        except Exception:
            # The record itself must not suffer.
            self.memory.give(slot)
            logger.exception("[lab] a record could not be copied")
            return "failed"
        return None

    def _settled(self, copy: RecordCopy, committed: bool) -> None:
        if not committed:
            self.memory.give(copy.slot)
            return
        with self._changed:
            if self._until is None:
                self._queue.append(copy)
                self._changed.notify()
                return
        self.memory.give(copy.slot)
        self.figures.count("stopped")

    def stats(self) -> LabStats:
        """Return the figures of this moment."""
        with self._changed:
            waiting = len(self._queue), sum(copy.nbytes for copy in self._queue)
        found = self.figures.read()
        return LabStats(
            formats=list(self._formats),
            sample=self._sample,
            cpu=self._share,
            problem=self._problem,
            records=found.records,
            waiting=waiting[0],
            waiting_bytes=waiting[1],
            cpu_s=found.cpu_s,
            restarts=found.restarts,
        )

    def stop(self, timeout_s: float) -> None:
        """Measure what waits, without the limit of CPU, at most `timeout_s`. What is left then is counted.

        After it, all rows are in the store or refused.
        """
        with self._changed:
            self._until = self._clock() + timeout_s
            self._changed.notify()
        self.join(timeout_s + 5.0)
        if self._writer is not None:
            self._writer.wait(_WRITTEN_S)

    # The thread

    def run(self) -> None:
        """Measure until `stop`."""
        try:
            while (copy := self._next()) is not None:
                outcome: str | None = "failed"
                try:
                    outcome = self._measured(copy)
                finally:
                    self.memory.give(copy.slot)
                    if outcome is not None:
                        self.figures.count(outcome)
            self._write_rows()
        except Exception:
            # Captures go on. What follows is counted as stopped.
            self._problem = "the thread of the lab has failed; the log says why"
            logger.exception("[lab] nothing is measured any more")
        finally:
            if self._process is not None:
                self._process.close()
            with self._changed:
                # Nobody takes from the queue any more.
                self._until = self._clock() if self._until is None else self._until
                copies = list(self._queue)
                self._queue.clear()
            for copy in copies:
                self.memory.give(copy.slot)
            left = len(copies) + sum(map(len, self._rows.values()))
            self.figures.count("stopped", left)
            if left:
                logger.warning("[lab] the daemon stopped before %d records were measured", left)

    def _next(self) -> RecordCopy | None:
        """Wait for a copy that may be measured now, with a process that can. None: stop."""
        while True:
            self._keep_process()
            with self._changed:
                if self._is_done:
                    return None
                wait_s = self._wait_s()
                if wait_s == 0.0:
                    return self._queue.popleft()
                rows_s = self._rows_since + _ROWS_WAIT_S - self._clock() if self._rows else None
                if rows_s is None or rows_s > 0:
                    self._changed.wait(
                        min((one for one in (wait_s, rows_s) if one is not None), default=None)
                    )
            if self._rows and self._clock() - self._rows_since >= _ROWS_WAIT_S:
                self._write_rows()

    def _wait_s(self) -> float | None:
        """Return the seconds until the next copy may be measured; None if that is not known."""
        if self._process is None:
            return max(0.01, self._next_start - self._clock())
        if not self._queue:
            return None
        if self._until is not None:
            return 0.0
        wait_s = self._budget.wait_s()
        if wait_s == 0.0 and self._is_busy():
            # The process takes only CPU time that is left over, but two CPUs may share one core. So it measures while
            # nobody waits, or a record now and then if that never comes.
            wait_s = min(self._budget.wait_full_s(), _BUSY_LOOK_S)
        return wait_s

    @property
    def _is_over(self) -> bool:
        return self._until is not None and self._clock() >= self._until

    @property
    def _is_done(self) -> bool:
        """Whether the daemon stops and nothing is left to measure, or no time for it."""
        return self._is_over or (self._until is not None and not self._queue)

    def _keep_process(self) -> None:
        """Start the process if there is none, and its pause is over."""
        if self._process is not None or self._clock() < self._next_start or self._is_done:
            return
        try:
            self._process = MeasuringProcess(self.memory, ",".join(self._formats))
            start_s = self._process.wait_ready(lambda: self._is_done)
            if self._has_measured:
                self._spend(start_s)
            self._has_measured = True
            logger.debug("[lab] process %d measures", self._process.pid)
        except (OSError, MeasuringLost) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        if self._process is not None:
            self._spend(self._process.close())
            self._process = None
        if self._is_done:
            return
        self._has_measured = True
        self._failures += 1
        self.figures.restart()
        pause_s = min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._failures - 1))
        # A process that is lost again and again must not take more than the share by its starts.
        pause_s = max(pause_s, self._budget.wait_s())
        self._next_start = self._clock() + pause_s
        self._problem = f"the process that measures is lost: {error}"
        logger.warning("[lab] %s; the next one starts in %.3g s", self._problem, pause_s)

    def _measured(self, copy: RecordCopy) -> str | None:
        """Measure a copy and keep its row. Return the outcome if there is no row."""
        assert self._process is not None  # noqa: S101 - `_next` waits for one
        order = MeasureOrder(copy.slot[0], copy.define.dtype, copy.shape, copy.client, copy.sequence)
        try:
            answer = self._process.ask(order, lambda: self._is_over)
        except MeasuringLost as error:
            self._lost(error)
            return "stopped" if self._is_over else "failed"
        self._failures, self._problem = 0, ""
        self._spend(answer.cpu_s)
        self._cost.learn(copy.nbytes, answer.cpu_s)
        if not answer.row:
            logger.warning("[lab] %s of %s is not measured: %s", copy.moment, copy.define.key, answer.problem)
            return "failed"
        if not self._rows:
            self._rows_since = self._clock()
        self._rows.setdefault(copy.run_id, []).append((copy, answer.row))
        rows = sum(map(len, self._rows.values()))
        if rows >= _MOST_ROWS or self._clock() - self._rows_since >= _ROWS_WAIT_S:
            self._write_rows()
        return None

    def _spend(self, cpu_s: float) -> None:
        self._budget.spend(cpu_s)
        self.figures.spend(cpu_s)

    def _write_rows(self) -> None:
        rows, self._rows = self._rows, {}
        assert self._writer is not None  # noqa: S101 - set before the thread starts
        for run_id, each in rows.items():
            self._writer.write(run_id, each)
