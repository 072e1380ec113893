"""The pipeline from accepted descriptors to committed records: fair dispatch, an encode pool, one append thread.

    submit → lanes (one per client) → dispatch thread → encode pool (chunks, no GIL) ─┐
      │ parts        ▲                      └── inbox, in dispatch order ─────────────┴→ append thread → sink
      └→ gather thread ┘ whole records

The dispatch thread takes jobs from the lanes in turn, so that ranks share the pool evenly. It books the bytes of every
chunk before the chunk is encoded. At most `staging_nbytes` of raw chunks are therefore between the arena and the disk.
The append thread commits in dispatch order (per client: in capture order). A full pipeline never blocks `submit`: jobs
in the lanes occupy only their slots in the ranks' arenas.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

from capd.errors import StoreError
from capd.histogram import Histogram
from capd.server.limits import DiskBudget
from capd.server.pipeline.append_thread import AppendThread
from capd.server.pipeline.gather_thread import GatherThread
from capd.server.pipeline.jobs import (
    Booked,
    Copier,
    Holder,
    Lanes,
    RecordJob,
    Refusal,
    Task,
    Tickets,
    plan_of,
)
from capd.server.pipeline.refusals import refusal_of
from capd.space import if_full
from capd.store.catalog.rows import SessionRow
from capd.store.catalog.totals import Held
from capd.store.format.dtypes import stored_type
from capd.store.format.encode import ChunkResult, encode_chunk, pieces, summarise_piece
from capd.store.format.frames import StatsRow
from capd.store.format.geometry import CHUNK_NBYTES
from capd.store.run.figures import Durations, NonFinite
from capd.store.run.options import StoreOptions
from capd.store.run.run_store import RunStore
from capd.store.run.small_records import Room
from capd.store.run.usage import Use
from capd.store.shards.series import Plan
from capd_client.protocol.counter_page import DropReason

__all__ = ["Pipeline"]

logger = logging.getLogger(__name__)


class Pipeline:
    """The runs below one store root on one node, and the threads that write them."""

    def __init__(
        self,
        root: Path,
        node: str,
        options: StoreOptions,
        *,
        threads: int,
        staging_nbytes: int,
        budget: DiskBudget,
        copier: Copier | None = None,
    ) -> None:
        """Start the threads. At most `staging_nbytes` of raw bytes are between the arena and the disk.

        `copier` is asked for a copy of each record before its slot may be freed.
        """
        self._root, self._node, self._options, self._budget = root, node, options, budget
        self._runs: dict[str, RunStore] = {}
        self._non_finite: dict[str, NonFinite] = {}
        self._open_lock = threading.Lock()
        self._booked, self._room, self._durations = Booked(staging_nbytes), Room(), Durations()
        self._lanes, self._tickets, self._copier = Lanes(), Tickets(), copier
        self.staging_nbytes = staging_nbytes
        # Asked for each record before its plan. None: every record is committed.
        self.holder: Holder | None = None
        # The kernel's ids of the encode threads.
        self._encoders: list[int] = []
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix="capd-encode",
            initializer=lambda: self._encoders.append(threading.get_native_id()),
        )
        self._appending = AppendThread(self._runs, self._booked, self._tickets, statistics=options.statistics)
        self._dispatching = threading.Thread(target=self._dispatch, name="capd-dispatch", daemon=True)
        self._gathering = GatherThread(
            lambda run_id: self._runs[run_id].spool,
            lambda task: self._lanes.put([task]),
            self._tickets,
            budget,
        )
        for thread in (self._appending, self._dispatching, self._gathering):
            thread.start()

    @property
    def writer(self) -> AppendThread:
        """The thread that commits records. Its checkpoints show that the daemon works."""
        return self._appending

    def open_run(self, run_id: str) -> None:
        """Open the run unless it is open. It is created or recovered if necessary. Raises StoreError."""
        with self._open_lock:
            if run_id in self._runs:
                return
            try:
                store = RunStore(self._root, run_id, self._node, self._options, self._room, self._durations)
            except OSError as error:
                why = if_full(error, self._root)
                raise StoreError(f"cannot open run {run_id!r} in {self._root}: {why}") from error
            # The counters of a run that comes back go on.
            store.non_finite = self._non_finite.setdefault(run_id, store.non_finite)
            self._runs[run_id] = store

    def open_runs(self) -> list[str]:
        """Return the ids of the open runs."""
        return list(self._runs)

    def committed(self, run_id: str, client: bytes) -> list[tuple[int, int]]:
        """Return the committed sequence ranges of a client. No job of it may be in work."""
        return self._runs[run_id].committed(client)

    def run_stats(self, run_id: str) -> Held:
        """Return the totals of an open run. Its numbers may differ by one record from each other."""
        return self._runs[run_id].totals()

    def waiting(self) -> tuple[int, int]:
        """Return (bytes, new series) of the records that the disk budget admitted and that are not written yet."""
        nbytes, series = self._tickets.admitted()
        return nbytes + self._gathering.held_nbytes, series

    @property
    def scratch_nbytes(self) -> int:
        """The bytes on the disk that belong to no record yet: the scratch files of records in parts."""
        return self._gathering.held_nbytes

    def overhead_nbytes(self, run_id: str) -> int:
        """See `RunStore.overhead_nbytes`."""
        return self._runs[run_id].overhead_nbytes()

    def uses(self, run_id: str) -> list[Use]:
        """Return the use of each quota of an open run."""
        return self._runs[run_id].usage.uses()

    def unsealed_records(self, run_id: str) -> int | None:
        """Return the committed records of a run that no sealed shard holds; None if this daemon never opened it."""
        store = self._runs.get(run_id)
        return None if store is None else store.unsealed_records

    def unsealed_series(self) -> int:
        """Return the number of series of the open runs that are not sealed yet."""
        return sum(store.unsealed_series for store in list(self._runs.values()))

    # Figures for metrics; none of them takes a lock

    def non_finite(self, run_id: str) -> NonFinite:
        """Return the non-finite values in the records of an open run."""
        return self._runs[run_id].non_finite

    @property
    def durations(self) -> tuple[Histogram, Histogram, Histogram]:
        """The durations of commits, syncs and seals."""
        return self._appending.commits, self._durations.syncs, self._durations.seals

    @property
    def staged_nbytes(self) -> int:
        """The raw bytes between the arenas and the disk."""
        return self._booked.nbytes

    @property
    def oldest_since(self) -> float | None:
        """The time (monotonic) at which the oldest capture came that is not committed yet; None without one."""
        return self._tickets.oldest_since

    @property
    def encoders(self) -> list[int]:
        """The kernel's ids of the encode threads that have started."""
        return list(self._encoders)

    @property
    def failing(self) -> bool:
        """Whether an open run takes no more records, or its last seal or catalog write failed."""
        runs = dict(self._runs)
        failing = {run_id for run_id, _ in self._appending.failing.copy()}
        return not failing.isdisjoint(runs) or any(store.failed for store in runs.values())

    def statistics_of(self, job: RecordJob) -> list[Future[StatsRow]]:
        """Return the statistics to come of the pieces of a record. Raises RuntimeError if the pipeline is closed."""
        stored = stored_type(job.define.dtype).stored
        flat = job.as_array(stored, (job.descriptor.nbytes // stored.itemsize,))
        sizes = pieces(job.descriptor.nbytes, stored.itemsize)
        return [self._pool.submit(summarise_piece, flat, piece, job.define.dtype) for piece in sizes]

    def submit(self, *jobs: RecordJob) -> None:
        """Queue jobs for their clients' lanes. Never waits."""
        since = jobs[0].since if jobs else 0.0
        first = self._tickets.issue(len(jobs), since)
        tasks = [Task(job, ticket) for ticket, job in enumerate(jobs, first)]
        self._lanes.put([task for task in tasks if not self._gathering.takes(task)])

    def hurry(self) -> None:
        """Note that somebody waits for submitted jobs. They no longer wait for others to join them."""
        self._lanes.hurry()

    def forget(self, client: bytes, record: int | None = None) -> None:
        """Release the parts of a record that will not be whole. None: of all such records of this client."""
        self._gathering.forget(client, record)

    def flush(self) -> Future[None]:
        """Return a future that resolves when everything submitted so far is committed or refused."""
        done = self._tickets.all_so_far()
        self.hurry()
        return done

    def post(self, run_id: str, action: Callable[[RunStore], Any]) -> Future[Any]:
        """Run `action` with the run's store on the append thread. The future raises OSError or StoreError."""
        done: Future[Any] = Future()

        def call() -> None:
            try:
                store = self._runs.get(run_id)
                if store is None:
                    raise StoreError(f"run {run_id!r} was closed in the meantime", retry=True)
                done.set_result(action(store))
            except (OSError, StoreError) as error:
                # The error belongs to the caller that waits for the result.
                done.set_exception(if_full(error, self._root))
            except sqlite3.Error as error:
                done.set_exception(StoreError(f"the catalog of run {run_id!r} failed: {error}"))
            except Exception as error:
                # As above, and the thread must go on.
                logger.exception("an action on run %s failed", run_id)
                done.set_exception(StoreError(f"internal error: {type(error).__name__}: {error}"))

        self._appending.inbox.put(call)
        return done

    def seal(self, run_id: str, *, is_last: bool = True) -> Future[None]:
        """Flush, then seal all series of the run. The future resolves when plain Zarr readers see everything.

        is_last: whether the ranks are quiet, as in `RunStore.seal`.
        """
        return _then(self.flush(), lambda: self.post(run_id, lambda store: store.seal(is_last=is_last)))

    def close_run(self, run_id: str) -> Future[None]:
        """Close a run that nobody writes to. A later `open_run` opens it again."""

        def close(store: RunStore) -> None:
            del self._runs[run_id]
            store.close()

        return self.post(run_id, close)

    def save_session(self, run_id: str, row: SessionRow) -> Future[None]:
        """Persist a session's counters in the run's catalog."""
        return self.post(run_id, lambda store: store.save_session(row))

    def close(self, deadline_s: float) -> bool:
        """Drain, seal and close. Return False after `deadline_s`: `.partial` files then stay for the next start."""
        complete = self.seal_all(time.monotonic() + deadline_s)
        self._gathering.stop(timeout_s=5.0)
        self._lanes.close()
        self._appending.inbox.put(None)
        for thread in (self._dispatching, self._appending):
            thread.join(timeout=5.0)
        self._pool.shutdown(wait=complete, cancel_futures=True)
        return complete

    def seal_all(self, until: float) -> bool:
        """Drain, then seal every open run. Return False if `until` (monotonic) passed or a run could not be sealed."""
        complete = True
        try:
            self.flush().result(timeout=max(0.0, until - time.monotonic()))
            for run_id in self.open_runs():
                try:
                    self.post(run_id, RunStore.seal).result(timeout=max(0.0, until - time.monotonic()))
                except (OSError, StoreError) as error:
                    if isinstance(error, TimeoutError):
                        raise
                    if run_id not in self._runs:
                        # It was sealed and closed in the meantime.
                        continue
                    logger.error("run %s could not be sealed: %s", run_id, error)
                    complete = False
        except TimeoutError:
            return False
        return complete

    def _dispatch(self) -> None:
        while tasks := self._lanes.get():
            if self.holder is not None:
                tasks = self._not_held(self.holder, tasks)
            self._plan([task for task in tasks if task.refusal is None])
            ready: list[Task] = []
            task: Task | None
            for task in tasks:
                if self._copier is not None and task.refusal is None:
                    task.copy = self._copier(task.job)
                ready.append(task)
                if task.refusal is None and not task.is_small:
                    task.chunks = queue.SimpleQueue()
                    # The task goes before its chunks, so that chunks are booked in the order of writing.
                    self._appending.inbox.put(ready)
                    ready = []
                    self._encode(task)
            if ready:
                self._appending.inbox.put(ready)
            # While this thread waits, nothing may hold a dead rank's arena.
            del tasks, ready
            task = None

    def _not_held(self, holder: Holder, tasks: list[Task]) -> list[Task]:
        """Return the tasks that go on. The others are held."""
        going: list[Task] = []
        for task in tasks:
            outcome = holder.take(task.job)
            if outcome is True:
                self._tickets.done([task.ticket])
                continue
            task.refusal = None if outcome is False else outcome
            going.append(task)
        return going

    def _plan(self, tasks: list[Task]) -> None:
        """Decide for each task where its record goes, or why it is refused."""
        planned: list[tuple[Task, Plan]] = []
        for task in tasks:
            try:
                store = self._runs[task.job.run_id]
                task.plan = plan_of(store, task.job)
                if store.usage.is_near(task.plan, task.job.kept_nbytes) and task.job.keep_statistics():
                    task.plan = plan_of(store, task.job)
                planned.append((task, task.plan))
            except Exception as error:
                # This is the outermost loop of the thread: an error of one job must not end the daemon.
                task.refusal = refusal_of(error, self._root)
        if self._admit(planned) is not None:
            # There may be room for some of them.
            for one in planned:
                one[0].refusal = self._admit([one])

    def _admit(self, planned: list[tuple[Task, Plan]]) -> Refusal | None:
        """Let all of these tasks pass to the disk, or none of them. Return why not."""
        held: dict[int, tuple[int, bool]] = {}
        # The plans of earlier tasks: one record opens the series, not all.
        opened: set[int] = set()
        try:
            for task, plan in planned:
                # A small record is written to the log first, then to a shard.
                copies = 0 if task.job.budgeted else 2 if plan.is_small else 1
                opens = plan.series is None and id(plan) not in opened
                held[task.ticket] = (task.job.kept_nbytes * copies, opens)
                opened.add(id(plan))
            nbytes, series = sum(one for one, _ in held.values()), sum(new for _, new in held.values())
            refusal = self._budget.refusal(nbytes, new_series=series)
        except Exception as error:
            # As in `_plan`.
            return refusal_of(error, self._root)
        if refusal is not None:
            return DropReason.DISK_FULL, refusal
        self._tickets.admit(held)
        return None

    def _encode(self, task: Task) -> None:
        assert task.chunks is not None  # noqa: S101 - set by the caller
        try:
            for chunk in self._submitted(task):
                task.chunks.put(chunk)
        except Exception as error:
            # As in `_plan`. The append thread meets the error among the chunks.
            logger.exception("job %d could not be encoded", task.job.sequence)
            failed: Future[ChunkResult] = Future()
            failed.set_exception(StoreError(f"internal error: {error}"))
            task.chunks.put((failed, 0))
        finally:
            task.chunks.put(None)

    def _submitted(self, task: Task) -> Iterator[tuple[Future[Any], int]]:
        """Yield the task's chunks as they enter the encode pool, with their booked bytes."""
        plan, job = task.plan, task.job
        assert plan is not None  # noqa: S101 - a task without a plan was refused
        if not job.descriptor.payload:
            dtype = job.define.dtype
            stored = stored_type(dtype).stored
            flat = job.as_array(stored, (job.descriptor.nbytes // stored.itemsize,))
            for piece in pieces(job.descriptor.nbytes, stored.itemsize):
                self._booked.take(CHUNK_NBYTES)
                yield self._pool.submit(summarise_piece, flat, piece, dtype), CHUNK_NBYTES
            return
        geometry, chain, shape = plan.geometry, plan.chain, job.descriptor.shape
        record = job.tensor(chain.stored)
        wanted = job.row is None and job.wants_statistics(self._options.statistics)
        statistics = job.define.dtype if wanted else None
        nbytes = prod(geometry.chunk) * geometry.itemsize
        for ordinal, slices in geometry.chunks(shape):
            self._booked.take(nbytes)
            yield (
                self._pool.submit(encode_chunk, record, ordinal, slices, geometry, chain, statistics),
                nbytes,
            )


def _then(first: Future[None], follow: Callable[[], Future[None]]) -> Future[None]:
    """Return a future for the result of `follow()`, which is called when `first` is done."""
    done: Future[None] = Future()

    def pass_on(future: Future[None]) -> None:
        error = future.exception()
        done.set_exception(error) if error else done.set_result(None)

    first.add_done_callback(lambda _: follow().add_done_callback(pass_on))
    return done
