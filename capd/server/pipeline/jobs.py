"""The jobs of the pipeline: a RecordJob comes from a session and travels as a Task from dispatch to commit."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from capd.store.disk.scratch import StoredBytes
from capd.store.format.codec_choice import SAMPLE_NBYTES
from capd.store.format.dtypes import statistics_of
from capd.store.format.encode import SliceSource, as_array
from capd.store.format.frames import StatsRow
from capd.store.format.geometry import SMALL_NBYTES
from capd.store.format.packed_statistics import unpack
from capd.store.run.run_store import RunStore
from capd.store.shards.series import Plan
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.messages import Define, Descriptor
from capd_client.protocol.scalars import is_scalar
from capd_client.protocol.statistics_row import NO_ROW_DTYPES, ROW_NBYTES

__all__ = [
    "PAUSE_NBYTES",
    "PAUSE_TASKS",
    "TURN_NBYTES",
    "Booked",
    "Chunks",
    "Copier",
    "Holder",
    "JobCopy",
    "Lanes",
    "Loss",
    "RecordJob",
    "Refusal",
    "Sink",
    "Task",
    "Tickets",
    "plan_of",
]  # fmt: skip

TURN_NBYTES = 1 << 20
# The time between two rounds of dispatch, unless PAUSE_TASKS or PAUSE_NBYTES wait.
PAUSE_S = 0.05
PAUSE_TASKS = 512
PAUSE_NBYTES = 2 << 20
# The fixed cost of a record, as the number of bytes that take the same time.
_TASK_NBYTES = 16 << 10

Refusal = tuple[DropReason, str]
Loss = tuple[Define, int, int, int]
"""Captures of one key that were held and are not committed: definition, iteration, count, and bytes."""
Chunks: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], int] | None]"


class Sink(Protocol):
    """The receiver of a job's outcome. The threads of the pipeline call it; it must neither block nor raise."""

    def committed(self, sequences: Sequence[int]) -> None:
        """Report that records are committed, or that parts have arrived and need not be sent again."""

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """Report that the record will never be committed."""

    def held(self, sequence: int) -> None:
        """Report that the holder has the record. Its outcome follows in another way."""


class JobCopy(Protocol):
    """A copy of a job's elements that outlives the job."""

    def settle(self, *, committed: bool, series: str) -> None:
        """Report the outcome of the job, and the path of its series; "" without one.

        The pipeline calls it once; it must neither block nor raise.
        """


@dataclass(slots=True)
class RecordJob:
    """A descriptor to commit.

    Attributes:
        data: Exactly the bytes of the descriptor, in the arena or in a file. A view of the arena is released when the
            job is done.
        row: The statistics row of the rank, if it computed one. It stays packed until the append thread needs it,
            because thousands of jobs may wait.
        budgeted: The disk budget has already admitted the record.
        judged: The rules have already seen the record.
        since: The time (monotonic) at which the descriptor came, for a record in parts that of the last part.
    """

    run_id: str
    client: bytes
    sequence: int
    define: Define
    descriptor: Descriptor
    data: memoryview | StoredBytes
    sink: Sink
    row: bytes | None = None
    budgeted: bool = False
    judged: bool = False
    since: float = field(default_factory=time.monotonic)

    def read(self, limit: int | None = None) -> memoryview | bytes:
        """Return the bytes in C order, or the first `limit` bytes in their stored order. Raises OSError."""
        if limit is None and self.descriptor.order is not None:
            return self.tensor(np.dtype(f"u{ITEM_NBYTES[self.define.dtype]}"))[()].tobytes()
        nbytes = self.descriptor.nbytes if limit is None else min(limit, self.descriptor.nbytes)
        return self.data[:nbytes] if isinstance(self.data, memoryview) else bytes(self.data.read(0, nbytes))

    def as_array(self, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> SliceSource:
        """Return the bytes as an array of `shape`, in their stored order. No copy."""
        if isinstance(self.data, memoryview):
            return as_array(self.data, stored, shape)
        return self.data.as_array(stored, shape)

    def tensor(self, stored: np.dtype[np.generic]) -> SliceSource:
        """Return the tensor in its own shape. No copy."""
        shape, order = self.descriptor.shape, self.descriptor.order
        if order is None or not isinstance(self.data, memoryview):
            return self.as_array(stored, shape)
        return as_array(self.data, stored, tuple(shape[axis] for axis in order)).transpose(np.argsort(order))

    def known_statistics(self) -> StatsRow | None:
        """Return the statistics that the rank computed; None if it computed none."""
        return None if self.row is None else unpack(np.frombuffer(self.row, dtype="<f8"), self.define.dtype)

    def wants_statistics(self, usually: bool) -> bool:
        """Return whether statistics are kept. usually: also for records with a payload that did not ask for them."""
        return usually or self.descriptor.statistics or not self.descriptor.payload

    def keep_statistics(self) -> bool:
        """Keep only the statistics of the tensor from now on. Return whether that changes anything.

        Scalars stay whole, as do records in parts and dtypes whose statistics are not exact.
        """
        if not self.may_keep_statistics:
            return False
        self.descriptor.payload = False
        return True

    @property
    def may_keep_statistics(self) -> bool:
        """Whether `keep_statistics` changes anything."""
        descriptor, define = self.descriptor, self.define
        if not descriptor.payload or descriptor.part is not None or define.dtype in NO_ROW_DTYPES:
            return False
        return not is_scalar(define.key)

    @property
    def kept_nbytes(self) -> int:
        """The raw bytes of the record that the store keeps."""
        return self.descriptor.nbytes if self.descriptor.payload else ROW_NBYTES


@dataclass(slots=True)
class Task:
    """A job on its way through the pipeline.

    Attributes:
        copy: A copy that hears of the outcome, after the rank does.
        chunks: The pool's results for a large tensor, as (future, booked bytes), then None. They are ChunkResults, or
            the StatsRows of its pieces if only statistics are kept.
    """

    job: RecordJob
    ticket: int
    plan: Plan | None = None
    refusal: Refusal | None = None
    chunks: Chunks | None = None
    copy: JobCopy | None = None

    @property
    def is_small(self) -> bool:
        """Whether the append thread does all the work: the record is small, and so are the bytes to read."""
        return self.plan is not None and self.plan.is_small and self.job.descriptor.nbytes < SMALL_NBYTES


Copier: TypeAlias = "Callable[[RecordJob], JobCopy | None]"
"""Copies the elements of a job, or not. It must neither block nor raise."""


class Holder(Protocol):
    """Holds records back from the store. The dispatch thread asks it; it must not raise."""

    def take(self, job: RecordJob) -> bool | Refusal:
        """Copy the bytes of a record and report it as held, if it is to be held. Return whether it was.

        A record that is not held goes on. A refusal is its outcome.
        """


def plan_of(store: RunStore, job: RecordJob) -> Plan:
    """Return the series of the job's record: one of tensors, or one of statistics.

    The codec of a statistics series depends on no sample.
    """
    define, shape = job.define, job.descriptor.shape
    if job.descriptor.payload:
        return store.plan(define.key, define.dtype, define.attributes, shape, job.read(SAMPLE_NBYTES))
    return store.plan(define.key, statistics_of(define.dtype), define.attributes, shape, b"")


class Booked:
    """The raw bytes between arena and disk. `take` waits until there is room; an oversized chunk passes alone."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit, self._used = limit_nbytes, 0
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """The bytes that are booked now. Takes no lock."""
        return self._used

    def take(self, nbytes: int) -> None:
        """Book `nbytes`, and wait for room if needed."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._limit)
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        """Return `nbytes` that were booked."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify()


@dataclass(slots=True)
class _Lane:
    client: bytes
    tasks: deque[Task]
    # Below 1, it is the turn of the other clients.
    credit: int = TURN_NBYTES


class Lanes:
    """The queues of the clients, emptied in turn, TURN_NBYTES at a time (deficit round robin).

    Neither many records nor large ones of one rank starve the others. A client whose queue is empty still owes the
    bytes that it took beyond its turn. Otherwise, large records that come one at a time would pass the records of
    everybody else. The queues have no limit of their own: the queued jobs occupy slots in the ranks' arenas, which are
    limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = threading.Condition()
        # The lanes of clients with tasks or debts.
        self._lanes: dict[bytes, _Lane] = {}
        self._turns: deque[_Lane] = deque()
        self._waiting = 0
        self._waiting_nbytes = 0
        self._clock = clock
        # Until this time, a small amount of work waits for more.
        self._next_round = clock()
        self._pausing = False
        self._hurried = False
        self._closed = False

    def put(self, tasks: Iterable[Task]) -> None:
        """Queue tasks, each after its client's earlier ones."""
        with self._changed:
            for task in tasks:
                client = task.job.client
                lane = self._lanes.get(client)
                if lane is None:
                    lane = self._lanes[client] = _Lane(client, deque())
                    self._turns.append(lane)
                lane.tasks.append(task)
                self._waiting += 1
                self._waiting_nbytes += task.job.descriptor.nbytes
            if self._waiting and (not self._pausing or self._presses()):
                self._changed.notify()

    def hurry(self) -> None:
        """Note that somebody waits for the queued tasks. The pause ends."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def get(self, limit: int = PAUSE_TASKS) -> list[Task]:
        """Wait for tasks and return the next ones; an empty list when the lanes are closed and empty.

        At most `limit` tasks are returned, and none after PAUSE_NBYTES, because tasks that come later must wait for
        all of these.

        After a round, the next one waits until PAUSE_S has passed, unless much work waits or somebody is in a hurry.
        Without the pause, the records of many slow ranks would be written one by one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._pausing = True
            self._changed.wait_for(self._presses, self._next_round - self._clock())
            self._pausing = False
            tasks: list[Task] = []
            nbytes = 0
            while self._waiting and len(tasks) < limit and nbytes < PAUSE_NBYTES:
                tasks.append(self._next())
                nbytes += tasks[-1].job.descriptor.nbytes
            self._hurried = self._hurried and self._waiting > 0
            self._next_round = self._clock() + PAUSE_S
            return tasks

    def _presses(self) -> bool:
        """Return whether the queued tasks go on at once."""
        return (
            self._hurried
            or self._closed
            or self._waiting >= PAUSE_TASKS
            or self._waiting_nbytes >= PAUSE_NBYTES
        )

    def _next(self) -> Task:
        turns = self._turns
        while (lane := turns[0]).credit <= 0 or not lane.tasks:
            if lane.credit <= 0:
                lane.credit += TURN_NBYTES
                turns.rotate(-1)
            else:
                turns.popleft()
                del self._lanes[lane.client]
        task = lane.tasks.popleft()
        self._waiting -= 1
        self._waiting_nbytes -= task.job.descriptor.nbytes
        lane.credit -= task.job.descriptor.nbytes + _TASK_NBYTES
        return task

    def close(self) -> None:
        """Let `get` return an empty list when everything is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Tickets:
    """The numbers of jobs in the order of submission. They tell when all jobs up to some point are done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        # Every ticket before this one is done.
        self._oldest = 1
        # The later tickets that are done.
        self._done: set[int] = set()
        self._waiting: list[tuple[int, Future[None]]] = []
        # Ticket → its bytes, and whether it opens a series.
        self._admitted: dict[int, tuple[int, bool]] = {}
        # (first ticket, time) of each issue with open jobs; when all jobs are done, also the last one.
        self._issues: deque[tuple[int, float]] = deque()

    def issue(self, count: int, since: float) -> int:
        """Issue ascending tickets for `count` new jobs that came at `since` (monotonic), and return the first."""
        with self._lock:
            first = self._last + 1
            if self._oldest == first:
                self._issues.clear()
            if count:
                self._issues.append((first, since))
            self._last += count
            return first

    @property
    def oldest_since(self) -> float | None:
        """The time (monotonic) at which the oldest job came that is not done; None without one. Takes no lock."""
        try:
            return self._issues[0][1] if self._oldest <= self._last else None
        except IndexError:
            return None

    def admit(self, held: Mapping[int, tuple[int, bool]]) -> None:
        """Note the jobs that the disk budget admitted. held: ticket → its bytes, and whether it opens a series."""
        with self._lock:
            self._admitted.update(held)

    def admitted(self) -> tuple[int, int]:
        """Return (bytes, new series) of the jobs that the disk budget admitted and that are not written yet."""
        with self._lock:
            held = list(self._admitted.values())
        return sum(nbytes for nbytes, _ in held), sum(new for _, new in held)

    def written(self, tickets: Iterable[int]) -> None:
        """Note that the admitted bytes of these jobs are on the disk, or never will be. Ranks may not know yet."""
        with self._lock:
            for ticket in tickets:
                self._admitted.pop(ticket, None)

    def done(self, tickets: Iterable[int]) -> None:
        """Note that the jobs of these tickets are committed or refused, and that their ranks have been answered."""
        with self._lock:
            self._done.update(tickets)
            while self._oldest in self._done:
                self._done.remove(self._oldest)
                self._oldest += 1
            issues = self._issues
            while len(issues) > 1 and issues[1][0] <= self._oldest:
                issues.popleft()
        self._wake()

    def all_so_far(self) -> Future[None]:
        """Return a future that resolves when every ticket issued until now is done."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((self._last, future))
        self._wake()
        return future

    def _wake(self) -> None:
        if not self._waiting:
            return
        with self._lock:
            ready = [future for ticket, future in self._waiting if ticket < self._oldest]
            self._waiting = [(ticket, future) for ticket, future in self._waiting if ticket >= self._oldest]
        for future in ready:
            future.set_result(None)
