"""The gather thread: collects records that come in parts, each in a scratch file until it is whole.

A part is answered when its bytes are in the file, which frees its slot. The whole record then takes the way of every
other record. It is read from the file chunk by chunk.

Captures that a rank sends after parts wait here for them, so its records stay in the order of capture. While a whole
record of a rank is not committed, the parts of its next record wait, too. A rank that is faster than the disk
therefore waits, and no other rank does.
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

from capd.server.limits import DiskBudget
from capd.server.pipeline.jobs import RecordJob, Refusal, Sink, Task, Tickets
from capd.server.pipeline.refusals import refusal_of
from capd.store.disk.scratch import Scratch
from capd_client.protocol.counter_page import DropReason

__all__ = ["MAX_SCRATCH_FILES", "GatherThread"]

# The scratch files of all ranks. A file lives from a record's first part to its commit.
MAX_SCRATCH_FILES = 64

# The client and the sequence of its record.
_Key = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class _Forget:
    """The point in a client's lane after which no part of `record` comes. None: no part of any record."""

    record: int | None


class GatherThread(threading.Thread):
    """The thread that takes parts, and the captures that come after them, until it is stopped."""

    def __init__(
        self,
        directory: Callable[[str], Path],
        submit: Callable[[Task], None],
        tickets: Tickets,
        budget: DiskBudget,
    ) -> None:
        """Prepare the thread, which the caller starts.

        `directory` returns the directory of a run's scratch files. `submit` takes whole records, and captures that
        waited for them.
        """
        super().__init__(name="capd-gather", daemon=True)
        self._directory, self._submit, self._tickets, self._budget = directory, submit, tickets, budget
        # Records that are not whole yet. Only this thread touches them.
        self._files: dict[_Key, Scratch] = {}
        self._changed = threading.Condition()
        # The tasks of each client, in order. No lane is empty; the client served last comes last.
        self._lanes: OrderedDict[bytes, deque[Task | _Forget]] = OrderedDict()
        # Clients with whole records that are not committed → the number of these records.
        self._whole: dict[bytes, int] = {}
        # These, and the files of whole records that are not committed.
        self._open: set[Scratch] = set()
        self._stopping = False

    # -- called by other threads

    def takes(self, task: Task) -> bool:
        """Take the task if it is a part, or if earlier tasks of its client wait here. Return whether it was taken."""
        client = task.job.client
        if task.job.descriptor.part is None and client not in self._lanes:
            return False
        self._put(client, task)
        return True

    def forget(self, client: bytes, record: int | None = None) -> None:
        """Release a record that lacks parts when all earlier tasks are done. None: all such records of the client."""
        self._put(client, _Forget(record))

    @property
    def held_nbytes(self) -> int:
        """The bytes of the scratch files. The records made from them will take as many again."""
        return sum(file.nbytes for file in list(self._open))

    def stop(self, timeout_s: float) -> None:
        """Finish the tasks that can go on, and end the thread. Waits at most `timeout_s`."""
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
            # While this thread waits, nothing may hold a dead rank's arena.
            del task
            self._done(client)
        for key in list(self._files):
            self._discard(key)

    def _put(self, client: bytes, task: Task | _Forget) -> None:
        with self._changed:
            self._lanes.setdefault(client, deque()).append(task)
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        """Wait for a client whose turn it is, and return it. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or any(map(self._may_go_on, self._lanes)))
            return next(filter(self._may_go_on, self._lanes), None)

    def _may_go_on(self, client: bytes) -> bool:
        task = self._lanes[client][0]
        part = None if isinstance(task, _Forget) else task.job.descriptor.part
        return part is None or part.first > 0 or client not in self._whole

    def _done(self, client: bytes) -> None:
        """Remove the client's first task. The other clients' turns come before its next one."""
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
        except Exception as error:
            # This is the outermost loop of the thread: an error of one record must not end the daemon.
            refusal = refusal_of(error, self._directory(job.run_id))
        if refusal is None:
            job.sink.committed([job.sequence])
        else:
            self._discard(key)
            job.sink.refused(job.sequence, *refusal)
        self._tickets.done([task.ticket])

    def _gather(self, key: _Key, job: RecordJob) -> Refusal | None:
        item = job.descriptor
        if not item.nbytes:
            # The rank gave up the record.
            self._discard(key)
            return None
        if item.part is not None and item.part.first == 0:
            refusal = self._begin(key, job.run_id, item.part.nbytes)
            if refusal is not None:
                return refusal
        if key not in self._files:
            return DropReason.STORE_ERROR, "an earlier part was refused"
        self._files[key].append(memoryview(job.read()))
        return None

    def _begin(self, key: _Key, run_id: str, nbytes: int) -> Refusal | None:
        if len(self._open) >= MAX_SCRATCH_FILES:
            return DropReason.STORE_ERROR, f"{MAX_SCRATCH_FILES} records in parts are already being gathered"
        # Twice: the scratch file, and the record in the store.
        refusal = self._budget.refusal(2 * nbytes)
        if refusal is not None:
            return DropReason.DISK_FULL, refusal
        file = self._files[key] = Scratch(self._directory(run_id), nbytes)
        self._open.add(file)
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
        """Close the file of a whole record whose outcome is known. Nobody reads it any more."""
        file.close()
        with self._changed:
            self._whole[client] -= 1
            if not self._whole[client]:
                del self._whole[client]
            self._changed.notify_all()
        self._open.discard(file)

    def _discard(self, key: _Key) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            file.close()
            self._open.discard(file)


class _LastPart:
    """The sink of a whole record: reports the record's outcome as the outcome of its last part."""

    def __init__(self, sink: Sink, sequence: int, done: Callable[[], None]) -> None:
        self._sink, self._sequence, self._done = sink, sequence, done

    def committed(self, _: Sequence[int]) -> None:
        self._done()
        self._sink.committed([self._sequence])

    def refused(self, _: int, reason: DropReason, message: str) -> None:
        self._done()
        self._sink.refused(self._sequence, reason, message)

    def held(self, _: int) -> None:
        self._done()
        self._sink.held(self._sequence)
