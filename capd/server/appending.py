"""The append thread: commits tasks in dispatch order, writes the catalogs, seals. It owns all run stores."""

from __future__ import annotations

import errno
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait

from capd.errors import StoreError, StoreFull
from capd.server.jobs import Booked, Job, Refusal, Task, Tickets
from capd.store.encode import ChunkResult
from capd.store.frames import RecordRow, StatsRow
from capd.store.run import RunStore
from capd.store.series import Plan
from capd.store.statistics import merge
from capd_client.protocol import DropReason

__all__ = ["AppendThread"]

logger = logging.getLogger(__name__)

_CATALOG_INTERVAL_S = 0.5
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class AppendThread(threading.Thread):
    """Takes tasks and actions from `inbox` until it is told to stop (None); closes the stores at the end."""

    def __init__(
        self, runs: Mapping[str, RunStore], booked: Booked, tickets: Tickets, *, statistics: bool
    ) -> None:
        super().__init__(name="capd-append", daemon=True)
        self.inbox: queue.SimpleQueue[Task | Callable[[], None] | None] = queue.SimpleQueue()
        self._runs, self._booked, self._tickets, self._statistics = runs, booked, tickets, statistics

    def run(self) -> None:
        """The thread's loop."""
        next_catalog = time.monotonic() + _CATALOG_INTERVAL_S
        running = True
        while running:
            try:
                item = self.inbox.get(timeout=max(0.0, next_catalog - time.monotonic()))
                if item is None:
                    running = False
                elif isinstance(item, Task):
                    self._finish(item)
                else:
                    item()
                del item  # while this thread waits, nothing may hold a dead rank's arena
            except queue.Empty:
                pass
            if time.monotonic() >= next_catalog or not running:
                self._each_store(RunStore.flush_catalog)
                next_catalog = time.monotonic() + _CATALOG_INTERVAL_S
        self._each_store(RunStore.close)

    def _each_store(self, action: Callable[[RunStore], None]) -> None:
        for run_id, store in list(self._runs.items()):
            try:
                action(store)
            except Exception:  # outermost loop of the thread; the frames hold everything the catalog lacks
                logger.exception("run %s: catalog or seal failed; trying again", run_id)

    def _finish(self, task: Task) -> None:
        refusal = task.refusal or self._commit(task)
        self._drain(task)
        self._report(task.job, refusal)
        self._tickets.done(task.ticket)
        self._each_store(RunStore.maintain)

    def _commit(self, task: Task) -> Refusal | None:
        try:
            self._write(self._runs[task.job.run_id], task)
        except OSError as error:
            return (DropReason.DISK_FULL if error.errno in _NO_SPACE else DropReason.STORE_ERROR, str(error))
        except StoreFull as error:
            return (DropReason.DISK_FULL, str(error))
        except StoreError as error:
            return (DropReason.STORE_ERROR, str(error))
        except Exception as error:  # the job is refused and the daemon goes on
            logger.exception("job %d failed", task.job.sequence)
            return (DropReason.STORE_ERROR, f"internal error: {error}")
        return None

    def _write(self, store: RunStore, task: Task) -> None:
        assert task.plan is not None  # noqa: S101 - a task without a plan was refused
        row = _row(task.job, task.plan)
        if task.plan.geometry.is_small:
            store.commit_small(task.plan, row, task.job.data)
            return
        row.stats = StatsRow() if self._statistics else None
        store.commit(task.plan, row, self._merged(task, row))

    def _merged(self, task: Task, row: RecordRow) -> Iterator[ChunkResult]:
        """The task's chunks; their statistics gather in `row`, complete when its COMMIT is written."""
        while (entry := task.chunks.get()) is not None:
            future, nbytes = entry
            try:
                chunk = future.result()
                if chunk.stats is not None and row.stats is not None:
                    row.stats = merge(row.stats, chunk.stats)
                yield chunk
            finally:
                self._booked.give(nbytes)
        task.chunks.put(None)  # `_drain` finds the end

    def _drain(self, task: Task) -> None:
        """Wait for the chunks of a job that failed half-way: nothing may read its slot once it is refused."""
        while (entry := task.chunks.get()) is not None:
            wait([entry[0]])
            self._booked.give(entry[1])

    def _report(self, job: Job, refusal: Refusal | None) -> None:
        try:
            if refusal is None:
                job.sink.committed(job.sequence)
            else:
                job.sink.refused(job.sequence, *refusal)
        except Exception:  # a sink belongs to one session; the others must not suffer
            logger.exception("the session of job %d could not be told", job.sequence)


def _row(job: Job, plan: Plan) -> RecordRow:
    descriptor, attributes = job.descriptor, job.define.attributes
    own = "" if attributes == plan.header.attributes else json.dumps(attributes, sort_keys=True)
    return RecordRow(
        job.client,
        job.sequence,
        descriptor.shape,
        descriptor.nbytes,
        descriptor.moment,
        descriptor.device,
        descriptor.requires_grad,
        descriptor.is_leaf,
        descriptor.metadata,
        own,
    )
