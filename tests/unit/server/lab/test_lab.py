"""Which records the lab copies, why it leaves others out, and that its memory comes back."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from capd.config import DaemonSettings
from capd.lab.messages import MeasureOrder
from capd.server.lab import lab as module
from capd.server.lab.copies import RecordCopy
from capd.server.lab.lab import Lab
from capd.server.lab.measuring_process import MeasuringLost, MeasuringProcess
from capd.server.pipeline.jobs import RecordJob
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor
from capd_client.protocol.scalars import scalar_key

if TYPE_CHECKING:
    from capd.server.limits import DiskBudget

KEY = Key(quant_type="bf16", rank=0, tensor_name="input", module="layers.0", layer=0)


class NoSink:
    """Hears of no outcome, because no job is committed here."""

    def committed(self, sequences: Sequence[int]) -> None:
        raise AssertionError(sequences)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        raise AssertionError(message)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab whose thread never begins, with room for one MiB of copies."""
    settings = DaemonSettings.model_validate({"lab_formats": "mxfp8", "lab_sample": "1/2", "lab_cpu": "100%"})
    made = Lab(settings, 2 << 20)
    yield made
    made.memory.close()


def job(
    values: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
    *,
    iteration: int = 0,
    key: Key = KEY,
    dtype: str = "bfloat16",
    order: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> RecordJob:
    data = memoryview(values.tobytes())
    item = Descriptor(
        7, 4096, len(data), 0, values.shape if shape is None else shape, Moment(iteration=iteration), order=order
    )  # fmt: skip
    return RecordJob("run", b"c" * 16, 7, Define(id=0, key=key, dtype=dtype), item, data, NoSink())


def outcomes(lab: Lab) -> dict[str, int]:
    return {name: count for name, count in lab.figures.read().records.items() if count}


def held(lab: Lab, copy: RecordCopy, nbytes: int) -> bytes:
    return os.pread(lab.memory.fd, nbytes, copy.slot[0])


def test_a_copy_has_the_elements_in_their_order_whatever_that_of_the_arena(lab: Lab) -> None:
    values = np.arange(24 * 7, dtype=np.uint16).reshape(24, 7)
    plain = lab.take(job(values))
    turned = lab.take(job(np.ascontiguousarray(values.T), order=(1, 0), shape=(24, 7)))
    assert plain is not None
    assert turned is not None
    assert held(lab, plain, values.nbytes) == held(lab, turned, values.nbytes) == values.tobytes()
    assert outcomes(lab) == {}


def test_what_is_outside_of_the_sample_or_no_source_is_not_counted(lab: Lab) -> None:
    values = np.zeros((4, 4), np.uint16)
    assert lab.take(job(values, iteration=1)) is None
    assert lab.take(job(values, dtype="int16")) is None
    assert lab.take(job(values, key=scalar_key("loss", 0))) is None
    assert outcomes(lab) == {}


def test_each_reason_against_a_record_of_the_sample_is_counted(lab: Lab) -> None:
    assert lab.take(job(np.zeros((0,), np.uint16), shape=(4, 4))) is None
    assert lab.take(job(np.zeros((1 << 20,), np.uint16))) is None
    assert outcomes(lab) == {"no_elements": 1, "too_large": 1}


def test_memory_is_bounded_and_comes_back_when_a_record_is_refused(lab: Lab) -> None:
    quarter = np.zeros((128 << 10,), np.uint16)
    taken = [lab.take(job(quarter)) for _ in range(6)]
    copies = [copy for copy in taken if copy is not None]
    assert len(copies) == 4
    assert outcomes(lab) == {"memory": 2}
    copies[0].settle(committed=False)
    again = lab.take(job(quarter))
    assert again is not None
    assert outcomes(lab) == {"memory": 2}
    again.settle(committed=True)
    assert (lab.stats().waiting, lab.stats().waiting_bytes) == (1, quarter.nbytes)


def test_an_empty_tensor_is_measured_too(lab: Lab) -> None:
    copy = lab.take(job(np.zeros((0, 32), np.uint16)))
    assert copy is not None
    assert copy.nbytes == 0


def test_a_record_that_came_in_parts_is_counted(lab: Lab) -> None:
    whole = job(np.zeros((4, 4), np.uint16))
    # A whole record that came in parts is read from a file.
    in_file = dataclasses.replace(whole, data=object())  # type: ignore[arg-type]
    assert lab.take(in_file) is None
    assert outcomes(lab) == {"in_parts": 1}


class Process:
    """A process that measures nothing: its start takes 4 s of CPU, and its only record another second."""

    def __init__(self, *_words: object) -> None:
        self.pid = 1

    def wait_ready(self, _is_stopping: object) -> float:
        return 4.0

    def close(self) -> float:
        return 1.0


def test_processes_that_are_lost_and_started_again_take_from_the_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over 600 s, with a process that is lost whenever it is ready, the share is kept up to its burst."""
    monkeypatch.setattr(module, "MeasuringProcess", Process)
    monkeypatch.setattr(module, "_MOST_PAUSE_S", 1.0)
    now = 0.0
    settings = DaemonSettings.model_validate({"lab_formats": "mxfp8", "lab_cpu": "20%"})
    made = Lab(settings, 2 << 20, clock=lambda: now)
    while now < 600:
        made._keep_process()
        if made._process is not None:
            made._lost(MeasuringLost("killed"))
        now += 0.25
    made.memory.close()
    spent = made.figures.read()
    # The start of the first one is free.
    assert 0.8 * 0.2 * 600 <= spent.cpu_s <= 0.2 * 600 + 5.0
    assert 20 <= spent.restarts <= 25


def test_it_measures_while_no_rank_waits_or_when_its_time_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MeasuringProcess", Process)
    now, busy = 0.0, False
    settings = DaemonSettings.model_validate({"lab_formats": "mxfp8", "lab_cpu": "20%"})
    made = Lab(settings, 2 << 20, clock=lambda: now)
    monkeypatch.setattr(made, "start", lambda: None)
    made.begin(lambda *_: None, cast("DiskBudget", None), is_busy=lambda: busy)
    made._keep_process()
    copy = made.take(job(np.zeros((4, 4), np.uint16)))
    assert copy is not None
    copy.settle(committed=True)

    made._budget.spend(0.1)
    assert made._wait_s() == 0.0
    busy = True
    assert made._wait_s() == pytest.approx(0.01)
    now += 0.495
    assert made._wait_s() == pytest.approx(0.005)
    now += 0.01
    assert made._wait_s() == 0.0
    # A debt is waited for in any case, and nobody waits at the stop.
    made._budget.spend(1.0)
    busy = False
    assert made._wait_s() == pytest.approx(3.0)
    made._until = now
    assert made._wait_s() == 0.0
    made.memory.close()


def test_the_cpu_time_of_a_process_that_is_killed_is_known() -> None:
    settings = DaemonSettings.model_validate({"lab_formats": "mxfp8"})
    made = Lab(settings, 2 << 20)
    process = MeasuringProcess(made.memory, "mxfp8")
    start_s = process.wait_ready(lambda: False)
    assert start_s > 0.05
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(MeasuringLost, match="it ended by signal 9"):
        process.ask(MeasureOrder(0, "float32", (4,), b"c" * 16, 1), lambda: False)
    # The answer told the start.
    assert 0 <= process.close() < start_s
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)

    early = MeasuringProcess(made.memory, "mxfp8")
    with pytest.raises(MeasuringLost, match="the daemon stops"):
        early.wait_ready(lambda: True)
    assert early.close() > 0
    made.memory.close()


def test_an_error_in_the_thread_loses_no_count(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((4, 4), np.uint16)
    copies = [copy for _ in range(4) if (copy := lab.take(job(values))) is not None]
    for copy in copies[:3]:
        copy.settle(committed=True)

    def fail(_copy: RecordCopy) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(lab, "_next", lambda: lab._queue.popleft())
    monkeypatch.setattr(lab, "_measured", fail)
    lab.run()
    copies[3].settle(committed=True)
    assert outcomes(lab) == {"failed": 1, "stopped": 3}
    # All of the memory came back.
    assert lab.memory.take(lab.memory.nbytes) is not None
