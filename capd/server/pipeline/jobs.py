"""What travels through the pipeline: a RecordJob from a session, wrapped as a Task from dispatch to commit."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from capd.store.disk.scratch import Scratch
from capd.store.format.encode import SliceSource, as_array
from capd.store.format.frames import StatsRow
from capd.store.format.geometry import SMALL_NBYTES
from capd.store.format.packed_statistics import unpack
from capd.store.shards.series import Plan
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.messages import Define, Descriptor
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = [
    "PAUSE_NBYTES",
    "PAUSE_TASKS",
    "TURN_NBYTES",
    "Booked",
    "Chunks",
    "DiskGuard",
    "Lanes",
    "RecordJob",
    "Refusal",
    "Sink",
    "Task",
    "Tickets",
]  # fmt: skip

TURN_NBYTES = 1 << 20
PAUSE_S = 0.05  # between two rounds of dispatch that find little
PAUSE_TASKS = 512  # no longer little
PAUSE_NBYTES = 2 << 20
_TASK_NBYTES = 16 << 10  # what a record costs beside its bytes, in the time that bytes take

Refusal = tuple[DropReason, str]
Chunks: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], int] | None]"


class Sink(Protocol):
    """Where the outcome of a job goes; called from pipeline threads, must neither block nor raise."""

    def committed(self, sequences: Sequence[int]) -> None:
        """The records are committed; or parts, which are not the last ones, need not be sent again."""

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """The record will never be committed."""


class DiskGuard(Protocol):
    """Says why `nbytes` of records may not be written."""

    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        """Text for the rank, or None. new_series: how many series open with it."""


@dataclass(slots=True)
class RecordJob:
    """One descriptor to commit. `data`: exactly its bytes, in the arena, let go of when the job is done; or in a file.

    row: the statistics row of the rank, if it computed one; packed until the append thread needs it, because thousands
    may wait. budgeted: the disk budget let it pass already.
    """

    run_id: str
    client: bytes
    sequence: int
    define: Define
    descriptor: Descriptor
    data: memoryview | Scratch
    sink: Sink
    row: bytes | None = None
    budgeted: bool = False

    def read(self, limit: int | None = None) -> memoryview | bytes:
        """Its bytes in C order, or the first ones as they lie. Raises OSError."""
        if limit is None and self.descriptor.order is not None:
            return self.tensor(np.dtype(f"u{ITEM_NBYTES[self.define.dtype]}"))[()].tobytes()
        nbytes = self.descriptor.nbytes if limit is None else min(limit, self.descriptor.nbytes)
        return self.data[:nbytes] if isinstance(self.data, memoryview) else bytes(self.data.read(0, nbytes))

    def as_array(self, stored: np.dtype[np.generic], shape: tuple[int, ...]) -> SliceSource:
        """Its bytes, as they lie, as an array."""
        if isinstance(self.data, memoryview):
            return as_array(self.data, stored, shape)
        return self.data.as_array(stored, shape)

    def tensor(self, stored: np.dtype[np.generic]) -> SliceSource:
        """The tensor in its shape; no copy."""
        shape, order = self.descriptor.shape, self.descriptor.order
        if order is None or not isinstance(self.data, memoryview):
            return self.as_array(stored, shape)
        return as_array(self.data, stored, tuple(shape[axis] for axis in order)).transpose(np.argsort(order))

    def known_statistics(self) -> StatsRow | None:
        """What the rank computed."""
        return None if self.row is None else unpack(np.frombuffer(self.row, dtype="<f8"), self.define.dtype)

    def wants_statistics(self, usually: bool) -> bool:
        """Whether they are kept; `usually`: of tensors that are kept, too, unless the rank says so."""
        return usually or self.descriptor.statistics or not self.descriptor.payload

    @property
    def kept_nbytes(self) -> int:
        """Raw bytes of what the store keeps."""
        return self.descriptor.nbytes if self.descriptor.payload else ROW_NBYTES


@dataclass(slots=True)
class Task:
    """A job on its way. What the pool makes of a large tensor arrives in `chunks` as (future, booked bytes), closed
    by None: ChunkResults, or the StatsRows of its parts where only statistics are kept."""

    job: RecordJob
    ticket: int
    plan: Plan | None = None
    refusal: Refusal | None = None
    chunks: Chunks | None = None

    @property
    def is_small(self) -> bool:
        """Whether the append thread does all that is to do: a small record, of which only little must be read."""
        return self.plan is not None and self.plan.is_small and self.job.descriptor.nbytes < SMALL_NBYTES


class Booked:
    """Raw bytes between arena and disk; `take` waits until there is room (an oversized chunk passes alone)."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit, self._used = limit_nbytes, 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        """Book `nbytes`, waiting for room."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._limit)
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        """Return `nbytes`."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify()


@dataclass(slots=True)
class _Lane:
    client: bytes
    tasks: deque[Task]
    credit: int = TURN_NBYTES  # below 1: the others' turn


class Lanes:
    """One queue per client, emptied in turn, TURN_NBYTES at a time: neither many records nor large ones of one rank
    starve the others (deficit round robin). A client whose queue is empty still owes what it took beyond its turn, else
    large records that come one at a time would pass those of everybody. Unbounded; the slots that queued jobs occupy in
    the ranks' arenas bound it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = threading.Condition()
        self._lanes: dict[bytes, _Lane] = {}  # of clients with tasks, or in debt
        self._turns: deque[_Lane] = deque()
        self._waiting = 0
        self._waiting_nbytes = 0
        self._clock = clock
        self._next_round = clock()  # until when little waits for more
        self._pausing = False
        self._hurried = False
        self._closed = False

    def put(self, tasks: Iterable[Task]) -> None:
        """Queue tasks, each behind its client's others."""
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
        """Somebody waits for what is queued: no pause holds it back."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def get(self, limit: int = PAUSE_TASKS) -> list[Task]:
        """The next tasks, waiting for one; empty once the lanes are closed and empty. At most `limit`, and none behind
        PAUSE_NBYTES: however long these take, who comes meanwhile waits for them.

        What is taken within PAUSE_S of the last tasks waits for the rest of this time, if it is little and nobody is
        in a hurry: of many ranks that trickle, each would have its records written alone.
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
        """Whether what is queued goes on at once."""
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
        """Let `get` return nothing once everything is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Tickets:
    """Numbers jobs in the order of submission and tells when all up to some point are done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._oldest = 1  # every ticket before it is done
        self._done: set[int] = set()  # of the later ones
        self._waiting: list[tuple[int, Future[None]]] = []
        self._admitted: dict[int, tuple[int, bool]] = {}  # bytes, and whether they open a series

    def issue(self, count: int = 1) -> int:
        """Tickets for so many new jobs, ascending; returns the first."""
        with self._lock:
            first = self._last + 1
            self._last += count
            return first

    def admit(self, held: Mapping[int, tuple[int, bool]]) -> None:
        """The disk budget let these jobs pass. held: by ticket, bytes, and whether they open a series."""
        with self._lock:
            self._admitted.update(held)

    def admitted(self) -> tuple[int, int]:
        """(bytes, new series) of the jobs that the disk budget let pass and that are not written yet."""
        with self._lock:
            held = list(self._admitted.values())
        return sum(nbytes for nbytes, _ in held), sum(new for _, new in held)

    def written(self, tickets: Iterable[int]) -> None:
        """What these jobs were let pass for lies on the disk, or never will; their ranks may not know yet."""
        with self._lock:
            for ticket in tickets:
                self._admitted.pop(ticket, None)

    def done(self, tickets: Iterable[int]) -> None:
        """The jobs with these tickets are committed or refused, and their ranks told."""
        with self._lock:
            self._done.update(tickets)
            while self._oldest in self._done:
                self._done.remove(self._oldest)
                self._oldest += 1
        self._wake()

    def all_so_far(self) -> Future[None]:
        """Resolves when every ticket issued until now is done."""
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
