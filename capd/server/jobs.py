"""What travels through the pipeline: a Job from a session, wrapped as a Task from dispatch to commit."""

from __future__ import annotations

import queue
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from capd.store.encode import ChunkResult
from capd.store.series import Plan
from capd_client.protocol import Define, Descriptor, DropReason

__all__ = ["Booked", "DiskLimit", "Job", "Lanes", "Refusal", "RunTotals", "Sink", "Task", "Tickets"]

Refusal = tuple[DropReason, str]


class Sink(Protocol):
    """Where the outcome of a job goes; called from pipeline threads, must neither block nor raise."""

    def committed(self, sequence: int) -> None:
        """The record is committed."""

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """The record will never be committed."""


class DiskLimit(Protocol):
    """Says why a record of `nbytes` may not be written."""

    def refusal(self, nbytes: int) -> str | None:
        """Text for the rank, or None."""


@dataclass(slots=True)
class Job:
    """One descriptor to commit. `data`: exactly its bytes, in the arena; let go of when the job is done."""

    run_id: str
    client: bytes
    sequence: int
    define: Define
    descriptor: Descriptor
    data: memoryview
    sink: Sink


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What one run holds on this node."""

    records: int
    raw_bytes: int
    stored_bytes: int


@dataclass(slots=True)
class Task:
    """A job on its way. Its chunks arrive in `chunks` as (future, booked bytes), closed by None."""

    job: Job
    ticket: int
    plan: Plan | None = None
    refusal: Refusal | None = None
    chunks: queue.SimpleQueue[tuple[Future[ChunkResult], int] | None] = field(
        default_factory=queue.SimpleQueue
    )


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


class Lanes:
    """One queue per client, emptied in turn: a busy rank does not starve the others. Unbounded; the slots
    that queued jobs occupy in the ranks' arenas bound it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lanes: dict[bytes, deque[Task]] = {}
        self._turns: deque[bytes] = deque()
        self._closed = False

    def put(self, task: Task) -> None:
        """Queue a task behind its client's others."""
        with self._changed:
            lane = self._lanes.setdefault(task.job.client, deque())
            lane.append(task)
            if len(lane) == 1:
                self._turns.append(task.job.client)
                self._changed.notify()

    def get(self) -> Task | None:
        """The next task, waiting for one; None once the lanes are closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._turns or self._closed)
            if not self._turns:
                return None
            client = self._turns.popleft()
            lane = self._lanes[client]
            task = lane.popleft()
            if lane:
                self._turns.append(client)
            else:
                del self._lanes[client]
            return task

    def close(self) -> None:
        """Let `get` return None once everything is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Tickets:
    """Numbers jobs in the order of submission and tells when all up to some point are done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._outstanding: dict[int, None] = {}
        self._waiting: list[tuple[int, Future[None]]] = []

    def issue(self) -> int:
        """A ticket for a new job."""
        with self._lock:
            self._last += 1
            self._outstanding[self._last] = None
            return self._last

    def done(self, ticket: int) -> None:
        """The job with this ticket is committed or refused."""
        with self._lock:
            del self._outstanding[ticket]
        self._wake()

    def all_so_far(self) -> Future[None]:
        """Resolves when every ticket issued until now is done."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((self._last, future))
        self._wake()
        return future

    def _wake(self) -> None:
        with self._lock:
            oldest = next(iter(self._outstanding), self._last + 1)
            ready = [future for ticket, future in self._waiting if ticket < oldest]
            self._waiting = [(ticket, future) for ticket, future in self._waiting if ticket >= oldest]
        for future in ready:
            future.set_result(None)
