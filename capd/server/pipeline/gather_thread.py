"""Gathers records that come in parts: each in a scratch file, written by a thread of its own, until it is whole.

A part is answered as soon as its bytes are in the file, which frees its slot. The whole record then goes the way of
every other, read out of the file chunk by chunk. What a rank sends behind parts waits here for them, so that its
records stay in the order of capture, and so do the parts of its next record while a whole one is not committed: a rank
that is faster than the disk waits, and no other rank does.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from capd.server.pipeline.jobs import DiskGuard, RecordJob, Refusal, Sink, Task, Tickets
from capd.server.pipeline.refusals import refusal_of
from capd.store.disk.scratch import Scratch
from capd_client.protocol.counter_page import DropReason

__all__ = ["MAX_SCRATCH_FILES", "GatherThread"]

MAX_SCRATCH_FILES = 64  # of all ranks, from a record's first part to its commit

_Key = tuple[bytes, int]  # client, record


@dataclass(frozen=True, slots=True)
class _Forget:
    """A place in a client's lane behind which nothing of `record` will come; None: of no record."""

    record: int | None


class GatherThread(threading.Thread):
    """Takes parts, and what comes behind them, until it is told to stop.

    directory: where a run's scratch files lie. submit: takes whole records, and what waited behind them.
    """

    def __init__(
        self,
        directory: Callable[[str], Path],
        submit: Callable[[Task], None],
        tickets: Tickets,
        budget: DiskGuard,
    ) -> None:
        super().__init__(name="capd-gather", daemon=True)
        self._directory, self._submit, self._tickets, self._budget = directory, submit, tickets, budget
        self._files: dict[_Key, Scratch] = {}  # gathering; this thread's own
        self._changed = threading.Condition()
        # By client, never empty, in order. The client that was served last comes last.
        self._lanes: OrderedDict[bytes, deque[Task | _Forget]] = OrderedDict()
        self._whole: dict[
            bytes, int
        ] = {}  # clients with a record that is whole and not committed, and how many
        self._held_files, self._held_nbytes = 0, 0
        self._stopping = False

    # -- called by other threads

    def takes(self, task: Task) -> bool:
        """Take the task if it is a part, or behind something of its client's that waits here."""
        client = task.job.client
        if task.job.descriptor.part is None and client not in self._lanes:
            return False
        self._put(client, task)
        return True

    def forget(self, client: bytes, record: int | None = None) -> None:
        """Let go of a record that lacks parts, once what came before this is done; None: of all of this client's."""
        self._put(client, _Forget(record))

    @property
    def held_nbytes(self) -> int:
        """Bytes of the scratch files, and as many are to come as records."""
        return self._held_nbytes

    def stop(self, timeout_s: float) -> None:
        """Work off what can be, and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.join(timeout_s)

    # -- the thread

    def run(self) -> None:
        """The thread's loop."""
        while (client := self._next()) is not None:
            task = self._lanes[client][0]
            if isinstance(task, _Forget):
                for key in [key for key in self._files if key[0] == client and task.record in (None, key[1])]:
                    self._discard(key)
            elif task.job.descriptor.part is None:
                self._submit(task)
            else:
                self._take_part(task)
            del task  # while this thread waits, nothing may hold a dead rank's arena
            self._done(client)
        for key in list(self._files):
            self._discard(key)

    def _put(self, client: bytes, task: Task | _Forget) -> None:
        with self._changed:
            self._lanes.setdefault(client, deque()).append(task)
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        """The client whose turn it is, waiting for one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or any(map(self._may_go_on, self._lanes)))
            return next(filter(self._may_go_on, self._lanes), None)

    def _may_go_on(self, client: bytes) -> bool:
        task = self._lanes[client][0]
        part = None if isinstance(task, _Forget) else task.job.descriptor.part
        return part is None or part.first > 0 or client not in self._whole

    def _done(self, client: bytes) -> None:
        """The client's foremost task is done; the others' turns come before its next one."""
        with self._changed:
            lane = self._lanes[client]
            lane.popleft()
            if lane:
                self._lanes.move_to_end(client)
            else:
                del self._lanes[client]

    def _take_part(self, task: Task) -> None:
        job = task.job
        key = (job.client, job.descriptor.record)
        try:
            refusal = self._gather(key, job)
            if refusal is None and job.descriptor.ends_record:
                self._hand_on(key, task)
                return
        except Exception as error:  # outermost loop of the thread: one record must not end the daemon
            refusal = refusal_of(error, self._directory(job.run_id))
        if refusal is None:
            job.sink.committed([job.sequence])
        else:
            self._discard(key)
            job.sink.refused(job.sequence, *refusal)
        self._tickets.done([task.ticket])

    def _gather(self, key: _Key, job: RecordJob) -> Refusal | None:
        item = job.descriptor
        if not item.nbytes:  # the rank gave the record up
            self._discard(key)
            return None
        if item.part is not None and item.part.first == 0:
            refusal = self._begin(key, job.run_id, item.part.nbytes)
            if refusal is not None:
                return refusal
        if key not in self._files:
            return DropReason.STORE_ERROR, "a part before it was refused"
        self._files[key].append(memoryview(job.read()))
        return None

    def _begin(self, key: _Key, run_id: str, nbytes: int) -> Refusal | None:
        if self._held_files >= MAX_SCRATCH_FILES:
            return DropReason.STORE_ERROR, f"{MAX_SCRATCH_FILES} records in parts are gathered already"
        refusal = self._budget.refusal(2 * nbytes)  # the file, and the record that is made of it
        if refusal is not None:
            return DropReason.DISK_FULL, refusal
        self._files[key] = Scratch(self._directory(run_id), nbytes)
        self._hold(1, nbytes)
        return None

    def _hand_on(self, key: _Key, task: Task) -> None:
        """Submit the whole record in place of its last part."""
        job, file = task.job, self._files[key]
        descriptor = replace(
            job.descriptor, sequence=job.descriptor.record, offset=0, nbytes=file.nbytes, part=None
        )
        del self._files[key]
        with self._changed:
            self._whole[job.client] = self._whole.get(job.client, 0) + 1
        sink = _LastPart(job.sink, job.sequence, partial(self._settled, job.client, file))
        whole = dataclasses.replace(
            job, sequence=descriptor.sequence, descriptor=descriptor, data=file, sink=sink, budgeted=True
        )
        self._submit(Task(whole, task.ticket))

    def _settled(self, client: bytes, file: Scratch) -> None:
        """The outcome of a whole record is known: nobody reads its file any more."""
        file.close()
        with self._changed:
            self._whole[client] -= 1
            if not self._whole[client]:
                del self._whole[client]
            self._changed.notify_all()
        self._hold(-1, -file.nbytes)

    def _discard(self, key: _Key) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            file.close()
            self._hold(-1, -file.nbytes)

    def _hold(self, files: int, nbytes: int) -> None:
        with self._changed:
            self._held_files += files
            self._held_nbytes += nbytes


class _LastPart:
    """Has the outcome of a whole record answer its last part."""

    def __init__(self, sink: Sink, sequence: int, done: Callable[[], None]) -> None:
        self._sink, self._sequence, self._done = sink, sequence, done

    def committed(self, _: Sequence[int]) -> None:
        self._done()
        self._sink.committed([self._sequence])

    def refused(self, _: int, reason: DropReason, message: str) -> None:
        self._done()
        self._sink.refused(self._sequence, reason, message)
