"""Signal handlers that run in the middle of a capture, at every place of it: they capture, flush, close, or raise.

One that raises may cost that one capture, counted as `interrupted`. Its error reaches the job, no slot is lost, no
thread hangs, and later captures are taken.
"""

from __future__ import annotations

import dis
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch

import capd_client
from capd_client.device import transfers
from capd_client.protocol.key import Key
from capd_client.session.session import Session
from capd_client.staging import stager
from tests.kit.client.device import KEY, FakeDevice, Rig
from tests.kit.client.peer import Peer, wait_until
from tests.kit.tiers import rows

HANDLERS = Key(quant_type="fp32", rank=0, tensor_name="handler's")
FOLDER = os.path.join(os.path.dirname(capd_client.__file__), "")
CALLED_ANYWHERE = frozenset({"notices.py", "context.py"})  # also by others than captures


def is_of_captures(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(FOLDER) and os.path.basename(path) not in CALLED_ANYWHERE


def interrupt(call: Callable[[], None], line: int, handler: Callable[[], None]) -> bool:
    """Run `call`, and `handler` before its line-th line inside capd_client; whether it has so many.

    A superset of the places where a signal handler may run.
    """
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if not is_of_captures(frame):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith("with "):  # between its body and its end no handler runs
            passed += 1
            if passed == line:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return passed >= line


def interrupt_at(call: Callable[[], None], place: int, handler: Callable[[], None]) -> bool:
    """Run `call`, and `handler` at the place-th place inside capd_client where Python runs handlers of signals.

    That is at the begin of a function, behind a call of what is not a Python function of capd's, and at the end of a
    loop's turn (Python 3.11 and later). Returns whether there are so many places.
    """
    passed = 0
    names: dict[Any, dict[int, str]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_of_captures(frame):
            return None
        frame.f_trace_opcodes = True
        code = frame.f_code
        ops = names.setdefault(code, {i.offset: i.opname for i in dis.get_instructions(code)})
        before, returned = "RESUME", returns

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal passed, returns, before, returned
            if event == "return":
                returns += 1
            if event != "opcode":
                return step
            if returned == returns and before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
                passed += 1
                if passed == place:
                    handler()
            before, returned = ops[frame.f_lasti], returns
            return step

        return step

    returns = 0
    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return passed >= place


def exact(session: Session, offered: int) -> None:
    now = session.snapshot()
    assert (now.offered, now.in_flight) == (offered, 0)
    assert now.committed + sum(now.dropped.values()) == offered
    rows = session.queue.ledger._rows.values()  # without the handlers' that came inside of the queue
    assert sum(row.count for row in rows) <= sum(now.dropped.values())
    assert session.queue.slots.take(session.queue.slots.capacity) is not None


def values_of(peer: Peer, name: str) -> list[float]:
    """The one value of all elements of each record, of tensors that hold nothing else."""
    values = []
    for data in peer.data_of(name):
        tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
        assert bool(tensor.eq(tensor[0]).all()), "bytes of two captures in one record"
        values.append(tensor[0].item())
    return values


def offering(rig: Callable[..., Rig], on_device: bool) -> tuple[Session, Callable[[], None]]:
    """A session, and a call that captures a small tensor, on a device that copies at once or on the host."""
    r = rig(FakeDevice(nbytes=1 << 19, pinned=False))
    moment = r.session.context.moment()
    if on_device:
        r.session._stager = r.way
    return r.session, lambda: r.session.offer(torch.zeros(50), KEY, moment)


@pytest.mark.parametrize(
    ("policy", "numel", "on_device"),
    [("drop", 50, False), ("block", 20_000, False), ("thin", 50, True), ("stats", 20_000, True)],
)
def test_at_any_line_of_a_capture_a_handlers_capture_is_taken_or_one_drop(
    peer: Peer, rig: Callable[..., Rig], policy: str, numel: int, on_device: bool
) -> None:
    settings = {"max_block_ms": 10_000.0} if policy == "block" else {}
    r = rig(FakeDevice(nbytes=1 << 19), by_hand=True, policy=policy, max_mb_per_step=1e6, **settings)
    session, moment = r.session, r.session.context.moment()
    if on_device:
        session._stager = r.way

    def offer(key: Key, value: float) -> None:
        session.offer(torch.full((numel,), float(value)), key, moment)

    offer(KEY, 0.0)
    line, offered = 0, 1
    met = True
    while met:
        line += 1
        met = interrupt(lambda: offer(KEY, line), line, lambda: offer(HANDLERS, -line))  # noqa: B023
        offered += 1 + met
        r.finish()
        assert session.flush(20)
    assert line > 40
    assert values_of(peer, KEY.tensor_name) == [float(n) for n in range(line + 1)]
    taken = values_of(peer, HANDLERS.tensor_name)
    assert taken == sorted(set(taken), reverse=True)
    assert session.snapshot().dropped == {"interrupted": line - 1 - len(taken)}
    assert taken
    exact(session, offered)


def test_a_drop_of_a_handler_inside_of_the_queue_is_counted_at_once(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True)
    with session.queue.lock:  # as the interrupted thread has it
        session.offer(torch.zeros(10), KEY, session.context.moment())
        session.drop_invalid("a name")
        assert session.snapshot().offered == 2
        assert not session.flush(60)
    assert session.snapshot().dropped == {"interrupted": 1, "invalid_key": 1}
    session.offer(torch.zeros(10), KEY, session.context.moment())
    assert session.flush(20)
    assert session.snapshot().committed == 1


def test_a_handler_that_closes_inside_of_the_queue_does_so_after_it(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True)
    session.offer(torch.zeros(10), KEY, session.context.moment())
    with session.queue.lock:
        assert not session.close(20)
    wait_until(lambda: peer.byes)
    for thread in threading.enumerate():
        if thread.name == "capd-close":
            thread.join()
    now = session.snapshot()
    assert (now.offered, now.committed, now.dropped) == (1, 1, {})


@pytest.mark.parametrize("on_device", [False, True])
def test_at_any_line_of_a_capture_a_handler_that_flushes_waits_for_nothing_that_cannot_be_settled(
    peer: Peer, rig: Callable[..., Rig], on_device: bool
) -> None:
    session, offer = offering(rig, on_device)

    def flush() -> None:
        started = time.monotonic()
        session.flush(60)
        assert time.monotonic() - started < 30

    line = 0
    met = True
    while met:
        line += 1
        met = interrupt(offer, line, flush)
    assert session.flush(20)
    exact(session, line)


@pytest.mark.parametrize("on_device", [False, True])
def test_ctrl_c_at_any_line_of_a_capture_holds_up_none_after_it(
    peer: Peer, rig: Callable[..., Rig], on_device: bool
) -> None:
    session, offer = offering(rig, on_device)

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    line = 0
    met = True
    while met:
        line += 1
        with suppress(KeyboardInterrupt):
            met = interrupt(offer, line, ctrl_c)
        assert session.flush(20), line
    assert line > 40
    assert session.snapshot().in_flight == 0


def raise_everywhere(
    r: Rig,
    error: type[BaseException],
    numel: int,
    *,
    on_device: bool,
    fill: Callable[[], object] = lambda: None,
    release: Callable[[], object] = lambda: None,
) -> None:
    """Raise from a handler at each place of a capture: the error reaches the job, the accounts are right again."""
    session, moment = r.session, r.session.context.moment()
    if on_device:
        session._stager = r.way

    raised, reached = 0, 0

    def raises(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise error

    def offer() -> None:
        session.offer(torch.ones(numel), KEY, moment)

    def fate() -> dict[str, int]:
        """What becomes of a capture that nothing interrupts."""
        then = session.snapshot()
        offer()
        assert session.flush(20)
        now = session.snapshot()
        ends = {reason: count - then.dropped.get(reason, 0) for reason, count in now.dropped.items()}
        ends["committed"] = now.committed - then.committed
        return {end: count for end, count in ends.items() if count}

    before = signal.signal(signal.SIGALRM, raises)
    usual = fate()
    try:
        place, met, offered, uncounted = 0, True, 0, 0
        while met:
            place += 1
            fill()
            offered = session.snapshot().offered
            try:
                met = interrupt_at(offer, place, raises)
            except error:
                reached += 1
            release()
            assert session.flush(20), place
            now = session.snapshot()
            assert (now.offered - offered in (0, 1), now.in_flight) == (True, 0), place
            assert now.offered == now.committed + sum(now.dropped.values()), place
            assert "internal" not in now.dropped, place
            uncounted += now.offered == offered
            offered = now.offered
    finally:
        signal.signal(signal.SIGALRM, before)
    assert place > 25
    assert uncounted < 5  # where `offer` has not begun yet
    assert raised == reached == place - 1
    assert fate() == usual
    wait_until(lambda: not session.queue.busy and not r.stager.pending)
    for slots in (session.queue.slots, r.stager._ring._slots):
        assert slots.take(slots.capacity) is not None


@pytest.mark.parametrize("error", rows([KeyboardInterrupt, TimeoutError], [TimeoutError]))
@pytest.mark.parametrize("policy", rows(["drop", "block", "thin", "stats"], ["thin"]))
@pytest.mark.parametrize(("numel", "on_device"), [(50, False), (50, True), (300_000, False), (300_000, True)])
def test_wherever_a_handler_raises_in_a_capture_it_costs_that_one_at_most_and_no_slot_is_lost(
    peer: Peer,
    rig: Callable[..., Rig],
    error: type[BaseException],
    policy: str,
    numel: int,
    on_device: bool,
) -> None:
    settings = {"max_block_ms": 10_000.0} if policy == "block" else {}
    r = rig(FakeDevice(nbytes=1 << 19, pinned=False), policy=policy, max_mb_per_step=1e6, **settings)
    raise_everywhere(r, error, numel, on_device=on_device)


@dataclass
class Prompt(FakeDevice):
    """Has done its copies when it is asked whether it has, unless it is busy."""

    busy: bool = False

    def query(self, event: Any) -> bool:
        if not self.busy:
            self.run_all()
        return super().query(event) and not self.busy


@pytest.mark.parametrize("error", rows([KeyboardInterrupt, TimeoutError], [TimeoutError]))
def test_wherever_a_handler_raises_where_a_copy_is_issued_it_costs_that_capture_at_most(
    peer: Peer, rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The ring holds one such tensor: each takes the place of the one before, and waits for its copy."""
    monkeypatch.setattr(transfers, "ISSUE_NBYTES", 1 << 20)
    settings = {"policy": "block", "max_block_ms": 10_000.0, "arena_bytes": 8 << 20}
    device = Prompt(nbytes=3 << 19)
    r = rig(device, ordered=True, **settings)

    def fill() -> None:
        device.busy = True
        r.offer(torch.ones(300_000))

    raise_everywhere(
        r, error, 300_000, on_device=True, fill=fill, release=lambda: setattr(device, "busy", False)
    )
    assert "MainThread" in r.device.fetched_by
    assert r.device.held_back
    assert all(data == torch.ones(300_000).numpy().tobytes() for data in peer.data_of("x"))


def test_a_handler_that_closes_in_the_middle_of_a_capture_waits_for_nothing(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture goes on after the handler, and is kept."""
    session = make_session(strict=True)
    session.offer(torch.ones(10), KEY, session.context.moment())
    move = stager.move_holding_gil

    def interrupted(*args: int) -> None:
        started = time.monotonic()
        assert not session.close(60)
        assert time.monotonic() - started < 30
        move(*args)

    monkeypatch.setattr(stager, "move_holding_gil", interrupted)
    session.offer(torch.ones(10), KEY, session.context.moment())
    for thread in threading.enumerate():
        if thread.name == "capd-close":
            thread.join()
    now = session.snapshot()
    assert (now.offered, now.committed, now.in_flight, now.dropped) == (2, 2, 0, {})
