"""The append thread: owns all run stores, commits tasks in dispatch order, writes the catalogs and seals."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from functools import reduce
from typing import Any

from capd.errors import StoreError
from capd.histogram import Histogram
from capd.server.pipeline.jobs import Booked, Chunks, Refusal, Sink, Task, Tickets, plan_of
from capd.server.pipeline.refusals import refusal_of
from capd.space import if_full
from capd.store.format.encode import ChunkResult, summarise_small
from capd.store.format.frames import RecordRow, SeriesHeader, StatsRow
from capd.store.format.packed_statistics import pack
from capd.store.format.statistics import merge
from capd.store.run.run_store import RunStore
from capd.store.shards.series import Plan

__all__ = ["AppendThread"]

logger = logging.getLogger(__name__)

_CATALOG_INTERVAL_S = 0.5
# Items taken from the inbox at once.
_GATHER = 256
# Bytes of small records written at once.
_TOGETHER_NBYTES = 4 << 20
# The longest time that a record waits for others before a group sync.
_GROUP_S = 0.02
# A failing disk must not be filled with messages.
_SAY_EVERY_S = 20.0

Item = Task | Callable[[], None] | None
OnCommit = Callable[[str, list[tuple[SeriesHeader, RecordRow]]], None]


class AppendThread(threading.Thread):
    """The thread that takes tasks and actions from `inbox` until a None comes. It closes the stores at the end."""

    def __init__(
        self, runs: Mapping[str, RunStore], booked: Booked, tickets: Tickets, *, statistics: bool
    ) -> None:
        super().__init__(name="capd-append", daemon=True)
        # Tasks in dispatch order, an action, or None.
        self.inbox: queue.SimpleQueue[list[Task] | Item] = queue.SimpleQueue()
        self._runs, self._booked, self._tickets, self._statistics = runs, booked, tickets, statistics
        # Tasks that are committed in durable stores but not acknowledged yet.
        self._unsynced: list[Task] = []
        self._group_since = 0.0
        # The time at which a run's failure was last logged.
        self._said: dict[str, float] = {}
        # It grows while the thread lives, at least every _CATALOG_INTERVAL_S if there is no work. Service managers
        # restart a daemon in which it stands still.
        self.checkpoints = 0
        # From the arrival of a descriptor to the commit of its record.
        self.commits = Histogram()
        # Is told of committed records, at once and without waiting. None: nobody asks.
        self.on_commit: OnCommit | None = None
        # (run, action) of the seals and catalog writes whose last attempt failed.
        self.failing: set[tuple[str, str]] = set()

    def run(self) -> None:
        """The thread's loop."""
        next_catalog = time.monotonic() + _CATALOG_INTERVAL_S
        running = True
        while running:
            self.checkpoints += 1
            items = self._take(max(0.0, next_catalog - time.monotonic()))
            running = None not in items
            self._work(items)
            # While this thread waits, nothing may hold a dead rank's arena.
            items.clear()
            if time.monotonic() >= next_catalog or not running:
                self._each_store(RunStore.flush_catalog)
                next_catalog = time.monotonic() + _CATALOG_INTERVAL_S
        self._each_store(RunStore.close)

    def _take(self, timeout_s: float) -> list[Item]:
        """Return the items of the inbox, up to a None. The list is empty only if `timeout_s` passed."""
        items: list[Item] = []
        with contextlib.suppress(queue.Empty):
            found = self.inbox.get(timeout=timeout_s)
            while True:
                items += found if isinstance(found, list) else [found]
                if found is None or len(items) >= _GATHER:
                    break
                found = self.inbox.get_nowait()
        return items

    def _work(self, items: list[Item]) -> None:
        """Commit the tasks in order, neighbouring small ones together. Actions run between them."""
        small: list[Task] = []
        room = _TOGETHER_NBYTES
        touched: set[str] = set()
        for item in items:
            self.checkpoints += 1
            if isinstance(item, Task):
                touched.add(item.job.run_id)
            if isinstance(item, Task) and item.refusal is None and item.is_small:
                nbytes = item.job.descriptor.nbytes
                if small and (nbytes > room or small[0].job.run_id != item.job.run_id):
                    self._commit_small(small)
                room = (room if small else _TOGETHER_NBYTES) - nbytes
                small.append(item)
                continue
            self._commit_small(small)
            if isinstance(item, Task):
                self._finish([item], item.refusal or self._attempt(item.job.run_id, item, self._write_large))
            elif item is not None:
                self._sync_group()
                item()
        self._commit_small(small)
        self._sync_group()
        for run_id in touched:
            if (store := self._runs.get(run_id)) is not None:
                self._safely(run_id, store, RunStore.maintain)

    def _each_store(self, action: Callable[[RunStore], None]) -> None:
        for run_id, store in list(self._runs.items()):
            self._safely(run_id, store, action)

    def _safely(self, run_id: str, store: RunStore, action: Callable[[RunStore], None]) -> None:
        try:
            action(store)
            self.failing.discard((run_id, action.__name__))
        except Exception as error:
            # This is the outermost loop of the thread. The frames hold everything that the catalog lacks.
            self.failing.add((run_id, action.__name__))
            now = time.monotonic()
            if now - self._said.get(run_id, -_SAY_EVERY_S) >= _SAY_EVERY_S:
                self._said[run_id] = now
                expected = isinstance(error, (OSError, StoreError, sqlite3.Error))
                why = if_full(error, store.path)
                logger.error(
                    "run %s: catalog or seal failed, retrying: %s", run_id, why, exc_info=not expected
                )

    # -- commits

    def _commit_small(self, tasks: list[Task]) -> None:
        """Commit small records of one run in one write; if that fails, one by one. Empties `tasks`."""
        if not tasks:
            return
        run_id = tasks[0].job.run_id
        refusal = self._attempt(run_id, tasks, self._write_small)
        if refusal is not None and len(tasks) > 1:
            for task in tasks:
                self._finish([task], self._attempt(run_id, [task], self._write_small))
        else:
            self._finish(tasks, refusal)
        tasks.clear()

    def _attempt(self, run_id: str, work: Any, write: Callable[[Any], None]) -> Refusal | None:
        try:
            write(work)
        except Exception as error:
            # The job is refused, and the daemon goes on.
            return refusal_of(error, self._runs[run_id].path)
        return None

    def _write_small(self, tasks: list[Task]) -> None:
        store = self._runs[tasks[0].job.run_id]
        # Others that were planned before them have filled the quota since.
        for task, is_near in zip(tasks, store.usage.near([*map(_raw, tasks)]), strict=True):
            if is_near and task.job.keep_statistics():
                task.plan = plan_of(store, task.job)
        data = [bytes(task.job.read()) for task in tasks]
        records: list[tuple[Plan, RecordRow, bytes]] = []
        for task, raw, stats in zip(tasks, data, self._summarised(tasks, data), strict=True):
            plan, row = _planned(task)
            row.stats = stats
            kept = raw if stats is None or task.job.descriptor.payload else pack(stats)
            records.append((plan, row, kept))
        store.commit_small(records)
        if self.on_commit is not None:
            new = [
                (plan.header, row)
                for task, (plan, row, _) in zip(tasks, records, strict=True)
                if not task.job.judged
            ]
            self.on_commit(tasks[0].job.run_id, new)

    def _summarised(self, tasks: list[Task], data: list[bytes]) -> list[StatsRow | None]:
        """Return the statistics of small records: the rank's own if it computed them, None if nobody wants any."""
        found = [task.job.known_statistics() for task in tasks]
        wanted = [
            at
            for at, task in enumerate(tasks)
            if found[at] is None and task.job.wants_statistics(self._statistics)
        ]
        computed = summarise_small([(tasks[at].job.define.dtype, data[at]) for at in wanted])
        for at, stats in zip(wanted, computed, strict=True):
            found[at] = stats
        return found

    def _write_large(self, task: Task) -> None:
        header, row = self._commit_large(task)
        if self.on_commit is not None and not task.job.judged:
            self.on_commit(task.job.run_id, [(header, row)])

    def _commit_large(self, task: Task) -> tuple[SeriesHeader, RecordRow]:
        plan, row = _planned(task)
        store, job = self._runs[task.job.run_id], task.job
        if not job.descriptor.payload:
            row.stats = reduce(merge, self._results(task), StatsRow())
            store.commit_small([(plan, row, pack(row.stats))])
            return plan.header, row
        row.stats = job.known_statistics()
        if row.stats is None and job.wants_statistics(self._statistics):
            row.stats = StatsRow()
        if row.stats is not None and job.may_keep_statistics and store.usage.is_near(*_raw(task)):
            for _ in self._merged(task, row):
                pass
            # The encode pool has read the whole tensor before.
            job.keep_statistics()
            task.plan = plan_of(store, job)
            plan, only = _planned(task)
            only.stats = row.stats
            store.commit_small([(plan, only, pack(row.stats))])
            return plan.header, only
        store.commit(plan, row, self._merged(task, row))
        return plan.header, row

    # -- outcomes

    def _finish(self, tasks: list[Task], refusal: Refusal | None) -> None:
        """Report tasks of one run, or keep them for the group sync."""
        for task in tasks:
            if task.chunks is not None:
                self._drain(task.chunks)
        if refusal is not None or not self._runs[tasks[0].job.run_id].is_durable:
            self._report(tasks, refusal)
            return
        if not self._unsynced:
            self._group_since = time.monotonic()
        self._unsynced += tasks
        if time.monotonic() - self._group_since > _GROUP_S:
            self._sync_group()

    def _sync_group(self) -> None:
        """Sync the writes of the waiting tasks, then acknowledge them. If a run's sync fails, refuse its tasks."""
        waiting, self._unsynced = self._unsynced, []
        outcomes: dict[str, Refusal | None] = {}
        for task in waiting:
            run_id = task.job.run_id
            if run_id not in outcomes:
                outcomes[run_id] = self._attempt(run_id, self._runs[run_id], RunStore.sync)
            self._report([task], outcomes[run_id])

    def _merged(self, task: Task, row: RecordRow) -> Iterator[ChunkResult]:
        """Yield the task's chunks. Their statistics collect in `row`, which is complete when its COMMIT is written."""
        for chunk in self._results(task):
            if chunk.stats is not None and row.stats is not None:
                row.stats = merge(row.stats, chunk.stats)
            yield chunk

    def _results(self, task: Task) -> Iterator[Any]:
        """Yield the results of the pool for the task, in order."""
        chunks = task.chunks
        assert chunks is not None  # noqa: S101 - the dispatch thread gives every task for the pool its queue
        while (entry := chunks.get()) is not None:
            future, nbytes = entry
            self.checkpoints += 1
            try:
                yield future.result()
            finally:
                self._booked.give(nbytes)
        # `_drain` must find the end, too.
        chunks.put(None)

    def _drain(self, chunks: Chunks) -> None:
        """Wait for the chunks of a job that failed half-way. After the refusal nothing may read its slot."""
        while (entry := chunks.get()) is not None:
            wait([entry[0]])
            self._booked.give(entry[1])

    def _report(self, tasks: list[Task], refusal: Refusal | None) -> None:
        tickets = [task.ticket for task in tasks]
        # This comes first. When the rank hears of it, the bytes must not count twice, as stored and as waiting.
        self._tickets.written(tickets)
        of_sink: dict[Sink, list[int]] = {}
        now = time.monotonic()
        for task in tasks:
            of_sink.setdefault(task.job.sink, []).append(task.job.sequence)
            if refusal is None:
                self.commits.add(now - task.job.since)
        for sink, sequences in of_sink.items():
            try:
                if refusal is None:
                    sink.committed(sequences)
                else:
                    for sequence in sequences:
                        sink.refused(sequence, *refusal)
            except Exception:
                # A sink belongs to one session; the other sessions must not suffer.
                logger.exception("the outcome of job %d could not be reported to its session", sequences[0])
        self._tickets.done(tickets)
        for task in tasks:
            if task.copy is not None:
                path = "" if task.plan is None else task.plan.header.path
                task.copy.settle(committed=refusal is None, series=path)


def _raw(task: Task) -> tuple[Plan, int]:
    assert task.plan is not None  # noqa: S101 - a task without a plan was refused
    return task.plan, task.job.kept_nbytes


def _planned(task: Task) -> tuple[Plan, RecordRow]:
    assert task.plan is not None  # noqa: S101 - a task without a plan was refused
    job, plan = task.job, task.plan
    descriptor, attributes = job.descriptor, job.define.attributes
    own = "" if attributes == plan.header.attributes else json.dumps(attributes, sort_keys=True)
    row = RecordRow(
        job.client,
        job.sequence,
        descriptor.shape,
        job.kept_nbytes,
        descriptor.moment,
        descriptor.device,
        descriptor.requires_grad,
        descriptor.is_leaf,
        descriptor.metadata.decode(),
        own,
    )
    return plan, row
