"""The thread that gathers parts: whole records in order, bytes as they were, files that go, limits and full disks."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from capd.server.pipeline import gather_thread
from capd.server.pipeline.gather_thread import GatherThread
from capd.server.pipeline.jobs import RecordJob, Task, Tickets
from capd.store.disk.scratch import Scratch
from capd.store.format.geometry import Geometry
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Part

DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="uint8")
A, B = b"a" * 16, b"b" * 16
TOTAL = 30


@dataclass(eq=False)
class Sink:
    """Puts every outcome into one queue."""

    outcomes: queue.SimpleQueue[tuple[int, DropReason | None]] = field(default_factory=queue.SimpleQueue)

    def committed(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self.outcomes.put((sequence, None))

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        self.outcomes.put((sequence, reason))

    def next(self) -> tuple[int, DropReason | None]:
        return self.outcomes.get(timeout=20)


@dataclass
class Budget:
    """Lets so many bytes pass."""

    room: int = 1 << 40
    asked: list[int] = field(default_factory=list)

    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        self.asked.append(nbytes)
        self.room -= nbytes
        return None if self.room >= 0 else "full"


@dataclass
class Bench:
    """A thread at work, and the tasks that it hands on."""

    directory: Path
    sink: Sink
    budget: Budget
    tickets: Tickets
    thread: GatherThread
    submitted: queue.SimpleQueue[Task]

    def put(self, sequence: int, *, part: Part | None = None, data: bytes = b"", client: bytes = A) -> bool:
        descriptor = Descriptor(
            sequence, 4096, len(data), 0, (part.nbytes if part else len(data),), Moment(), part=part
        )
        job = RecordJob("run", client, sequence, DEFINE, descriptor, memoryview(data), self.sink)
        return self.thread.takes(Task(job, self.tickets.issue(1, job.since)))

    def parts(self, record: int, client: bytes = A, upto: int = 3) -> None:
        """Three parts of ten bytes, all of the record's number."""
        for n in range(upto):
            part = Part(record, 10 * n, TOTAL)
            assert self.put(record + 1 + n, part=part, data=bytes([record]) * 10, client=client)

    def whole(self) -> Task:
        return self.submitted.get(timeout=20)

    def done(self) -> None:
        """All that came is answered."""
        self.tickets.all_so_far().result(timeout=20)

    def files(self) -> int:
        """Files below the directory that this process has open or mapped."""
        gc.collect()
        return descriptors(self.directory) + Path("/proc/self/maps").read_text().count(str(self.directory))


def descriptors(directory: Path) -> int:
    """How many of this process's are of files below it; those of other tests' threads and garbage come and go."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory))
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    sink, budget, tickets = Sink(), Budget(), Tickets()
    submitted: queue.SimpleQueue[Task] = queue.SimpleQueue()
    thread = GatherThread(lambda _: tmp_path, submitted.put, tickets, budget)
    thread.start()
    yield Bench(tmp_path, sink, budget, tickets, thread, submitted)
    thread.stop(20)
    assert not thread.is_alive()


def test_a_whole_record_is_one_job_with_its_own_sequence_and_answers_its_last_part(bench: Bench) -> None:
    bench.parts(40)
    assert [bench.sink.next(), bench.sink.next()] == [(41, None), (42, None)]
    task = bench.whole()
    job = task.job
    assert (job.sequence, job.descriptor.sequence, job.descriptor.part) == (40, 40, None)
    assert (job.descriptor.nbytes, bytes(job.read()), job.budgeted) == (TOTAL, bytes([40]) * TOTAL, True)
    assert bench.budget.asked == [2 * TOTAL]
    assert bench.thread.held_nbytes == TOTAL
    assert list(bench.directory.iterdir()) == []

    job.sink.committed([job.sequence])
    assert bench.sink.next() == (43, None)
    assert bench.thread.held_nbytes == 0
    del task, job
    assert bench.files() == 0


def test_a_refused_record_refuses_its_last_part(bench: Bench) -> None:
    bench.parts(40)
    job = bench.whole().job
    job.sink.refused(40, DropReason.STORE_ERROR, "no")
    assert [bench.sink.next() for _ in range(3)][-1] == (43, DropReason.STORE_ERROR)
    assert bench.thread.held_nbytes == 0


def test_what_comes_behind_parts_stays_behind_them_and_others_pass_by(bench: Bench) -> None:
    with bench.thread._changed:  # it turns to none of them before all are there
        bench.parts(40)
        assert bench.put(50, data=b"behind")
    assert not bench.put(60, data=b"of another rank", client=B)
    bench.parts(70)  # of which none is begun before 40 is committed
    bench.put(80, data=b"behind, too")
    bench.parts(40, client=B)

    found = [bench.whole() for _ in range(3)]
    assert [(t.job.client, t.job.sequence) for t in found if t.job.client == A] == [(A, 40), (A, 50)]
    assert [(t.job.client, t.job.sequence) for t in found if t.job.client == B] == [(B, 40)]
    with pytest.raises(queue.Empty):
        bench.submitted.get(timeout=0.1)

    next(t for t in found if t.job.client == A).job.sink.committed([40])
    assert [bench.whole().job.sequence for _ in range(2)] == [70, 80]


def test_without_parts_nothing_passes_here_any_more(bench: Bench) -> None:
    assert not bench.put(1, data=b"x")
    bench.parts(40)
    bench.whole().job.sink.committed([40])
    while bench.put(50, data=b"x"):  # until the thread has turned from the last part
        assert bench.whole().job.sequence == 50


def test_parts_of_two_records_may_alternate(bench: Bench) -> None:
    for n in range(3):
        for record in (40, 60):
            part = Part(record, 10 * n, TOTAL)
            bench.put(record + 1 + n, part=part, data=bytes([record + n]) * 10)
    found = [bytes(bench.whole().job.read()) for _ in range(2)]
    assert found == [b"".join(bytes([record + n]) * 10 for n in range(3)) for record in (40, 60)]


def test_a_record_given_up_and_a_client_that_is_gone_leave_no_file(bench: Bench) -> None:
    bench.parts(40, upto=2)
    bench.parts(60, upto=1)
    bench.parts(40, client=B, upto=1)
    assert {bench.sink.next()[0] for _ in range(4)} == {41, 42, 61}
    bench.done()
    assert bench.files() == 3
    bench.put(49, part=Part(40, 20, TOTAL))
    assert bench.sink.next() == (49, None)
    assert bench.files() == 2
    bench.thread.forget(A)
    bench.put(70, part=Part(69, 0, 10), data=bytes(10))
    assert bench.whole().job.sequence == 69
    assert bench.thread.held_nbytes == TOTAL + 10  # B's, and this one


def test_one_record_can_be_let_go_of(bench: Bench) -> None:
    bench.parts(40, upto=2)
    bench.parts(60, upto=2)
    bench.thread.forget(A, 40)
    bench.put(63, part=Part(60, 20, TOTAL), data=bytes(10))
    assert bench.whole().job.sequence == 60
    assert bench.thread.held_nbytes == TOTAL


def test_no_room_is_said_before_anything_is_written_and_refuses_the_rest(bench: Bench) -> None:
    bench.budget.room = 2 * TOTAL - 1
    bench.parts(40)
    assert bench.sink.next() == (41, DropReason.DISK_FULL)
    assert {bench.sink.next()[0] for _ in range(2)} == {42, 43}
    assert bench.thread.held_nbytes == 0
    assert bench.files() == 0


@pytest.mark.parametrize("step", ["posix_fallocate", "pwritev"])
def test_a_disk_that_is_full_after_all_refuses_the_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, step, full)
    bench.parts(40)
    assert bench.sink.next() == (41, DropReason.DISK_FULL)
    bench.done()
    monkeypatch.undo()
    assert bench.files() == 0
    assert bench.thread.held_nbytes == 0
    bench.parts(60)
    assert bytes(bench.whole().job.read()) == bytes([60]) * TOTAL


def test_files_are_limited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_thread, "MAX_SCRATCH_FILES", 2)
    for record in (10, 20, 30):
        bench.parts(record, upto=1)
    assert [bench.sink.next() for _ in range(3)] == [(11, None), (21, None), (31, DropReason.STORE_ERROR)]


def test_files_are_given_back_at_the_end(bench: Bench) -> None:
    bench.parts(40, upto=2)
    bench.done()
    bench.thread.stop(20)
    assert bench.files() == 0


# -- the file


def _without_tmpfile(real: Callable[..., int]) -> Callable[..., int]:
    def opens(path: object, flags: int, *more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, *more)

    return opens


@pytest.mark.parametrize("nameless", [True, False])
def test_a_scratch_file_is_private_has_its_space_and_leaves_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    (tmp_path / "scratch.tmp").write_bytes(b"of a process that was killed")
    if nameless:
        (tmp_path / "scratch.tmp").unlink()
    else:
        monkeypatch.setattr(os, "open", _without_tmpfile(os.open))
    scratch = Scratch(tmp_path, 1 << 20)
    found = os.fstat(scratch._fd)
    assert found.st_mode & 0o777 == 0o600
    assert found.st_blocks * 512 >= 1 << 20
    assert list(tmp_path.iterdir()) == []
    scratch.append(memoryview(b"a" * 5))
    scratch.append(memoryview(b"b" * ((1 << 20) - 5)))
    assert bytes(scratch.read(0, 6)) == b"aaaaab"
    assert bytes(scratch.read((1 << 20) - 1, 1)) == b"b"
    with pytest.raises(OSError, match="too early"):
        scratch.read(1 << 20, 1)
    scratch.close()
    scratch.close()


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [((), ()), ((7,), (7,)), ((10,), (3,)), ((4, 5), (1, 2)), ((3, 4, 5), (1, 3, 5)), ((3, 4, 5), (2, 2, 2))],
)
def test_slices_of_a_scratch_file_are_those_of_the_array(
    tmp_path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> None:
    array = np.arange(int(np.prod(shape)), dtype="<u2").reshape(shape)
    scratch = Scratch(tmp_path, array.nbytes)
    scratch.append(memoryview(array.tobytes()))
    geometry = Geometry(tuple(-(-n // c) * c for n, c in zip(shape, chunk, strict=True)), chunk, 1, 1, 2)
    for _, slices in geometry.chunks(shape):
        np.testing.assert_array_equal(scratch.as_array(array.dtype, shape)[slices], array[slices])
    scratch.close()


def test_a_disk_without_room_is_an_error_at_once_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r".*"):
        Scratch(tmp_path, 1 << 62)
    assert descriptors(tmp_path) == 0
