"""The copy pump: when it wakes, when it waits for the device, and what training threads issue without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from capd_client.device import pump, transfers
from tests.kit.client.device import KEY, FakeDevice, FakeEvent, Rig
from tests.kit.client.peer import Peer, wait_until

MIB = 1 << 20
MakeRig = Callable[..., Rig]


@pytest.fixture(autouse=True)
def issue_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training threads issue what is due from 1 MiB on."""
    monkeypatch.setattr(transfers, "ISSUE_NBYTES", MIB)


@dataclass
class Waiting(FakeDevice):
    """Says when the pump waits for it, and for which event."""

    waits: list[FakeEvent] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def wait(self, event: FakeEvent) -> None:
        self.waits.append(event)
        self.go.wait(30)
        self.go.clear()


def test_a_large_capture_is_issued_by_the_thread_that_captures(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=8 * MIB), by_hand=True, arena_bytes=16 * MIB)
    r.offer(torch.zeros(MIB // 2, dtype=torch.uint8))
    assert r.device.fetched_by == []  # too little to be worth the calls
    r.offer(torch.zeros(MIB, dtype=torch.uint8))
    assert r.device.fetched_by == ["MainThread"]
    assert r.device.sizes == [MIB + MIB // 2]
    r.finish()
    assert r.session.flush(10)


def test_no_more_is_issued_than_may_be_under_way(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "AHEAD_NBYTES", 2 * MIB)
    r = rig(FakeDevice(nbytes=16 * MIB), by_hand=True, arena_bytes=32 * MIB)
    for _ in range(8):
        r.offer(torch.zeros(MIB, dtype=torch.uint8))
    assert len(r.device.fetches) == 2
    r.finish()
    assert r.session.flush(10)


def test_a_training_thread_does_not_wait_for_the_pump(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=8 * MIB), by_hand=True, arena_bytes=16 * MIB)
    r.offer(torch.zeros(8))
    begun, done, fetch = threading.Event(), threading.Event(), r.device.fetch

    def slow(*args: Any, **more: Any) -> None:
        begun.set()
        done.wait(30)
        fetch(*args, **more)

    r.device.fetch = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=r.stager.advance)
    thread.start()
    begun.wait(30)
    r.offer(torch.zeros(MIB, dtype=torch.uint8))
    assert r.device.fetches == []
    done.set()
    thread.join()
    r.device.fetch = fetch  # type: ignore[method-assign]
    assert r.device.sizes[0] == 32
    r.finish()
    r.device.fetches.clear()
    r.device.marks.clear()
    r.offer(torch.zeros(MIB, dtype=torch.uint8))
    assert r.device.sizes == [MIB]
    r.finish()
    assert r.session.flush(10)


def test_it_waits_for_the_oldest_copy_while_more_is_due(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "AHEAD_NBYTES", 2 * MIB)
    device = Waiting(nbytes=16 * MIB)
    r = rig(device, arena_bytes=32 * MIB, piece_nbytes=MIB)
    for _ in range(6):
        r.offer(torch.zeros(MIB, dtype=torch.uint8))
    for count in range(1, 5):
        wait_until(lambda: len(device.waits) >= count)  # noqa: B023
        assert device.waits[-1] is device.marks[count - 1][1]
        device.run(count - 1)
        device.go.set()
        wait_until(lambda: len(device.fetches) >= count + 2)  # noqa: B023
    device.run_all()
    device.wait = lambda event: None  # type: ignore[method-assign,assignment]
    device.go.set()
    assert r.session.flush(20)
    assert r.session.snapshot().committed == 6


def test_what_is_not_urgent_is_brought_home_together(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "LINGER_S", 0.5)
    r = rig(FakeDevice(nbytes=MIB))
    for n in range(100):
        r.offer(torch.full((50,), float(n)))
    wait_until(lambda: r.device.marks)
    r.device.run_all()
    assert r.session.flush(10)
    assert len(r.device.fetches) == 1


def test_a_flush_ends_its_rest(peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "LINGER_S", 60.0)
    r = rig(FakeDevice(nbytes=MIB, pinned=False))
    for count in range(1, 4):
        r.offer(torch.full((50,), float(count)))
        began = time.monotonic()
        assert r.session.flush(30)
        assert time.monotonic() - began < 20
        assert r.session.snapshot().committed == count


def test_a_ring_that_fills_up_ends_its_rest(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "LINGER_S", 60.0)
    r = rig(FakeDevice(nbytes=MIB, pinned=False), arena_bytes=8 * MIB)
    for _ in range(20):
        r.offer(torch.zeros(100 << 10, dtype=torch.uint8))
        wait_until(lambda: r.stager._ring._slots.free_nbytes > MIB // 2 - (100 << 10))
    assert r.session.flush(30)
    assert r.session.snapshot().dropped == {}


def test_without_captures_it_sleeps(peer: Peer, rig: MakeRig) -> None:
    r = rig()
    asked: list[bool] = []
    wait_until(lambda: r.stager._pump._doze.dozing)
    pending = type(r.stager.transfers).pending
    r.stager._pump._called = lambda: asked.append(True) or pending.fget(r.stager.transfers)  # type: ignore
    time.sleep(0.2)
    assert asked == []


def test_an_error_on_a_training_thread_is_the_devices(peer: Peer, rig: MakeRig) -> None:
    """The job goes on; what was handed over is dropped, once each."""
    r = rig(FakeDevice(nbytes=8 * MIB), arena_bytes=16 * MIB)
    r.device.fault = RuntimeError("CUDA error: unspecified launch failure")
    for _ in range(3):
        r.offer(torch.zeros(MIB, dtype=torch.uint8))
    wait_until(lambda: r.stager.failed)
    r.offer(torch.zeros(MIB, dtype=torch.uint8))
    wait_until(lambda: r.session.snapshot().in_flight == 0)
    now = r.session.snapshot()
    assert (now.offered, now.committed, now.dropped) == (4, 0, {"internal": 4})


def test_a_copy_that_an_interrupt_kept_from_being_issued_is_issued_by_the_next(
    peer: Peer, rig: MakeRig
) -> None:
    r = rig(FakeDevice(nbytes=8 * MIB), by_hand=True, arena_bytes=16 * MIB)
    fetch = r.device.fetch

    def interrupted(*_: object, **__: object) -> None:
        r.device.fetch = fetch  # type: ignore[method-assign]
        raise KeyboardInterrupt

    r.device.fetch = interrupted  # type: ignore[method-assign]
    tensor = torch.randint(256, (MIB,), dtype=torch.uint8)
    r.session._stager = r.way
    with pytest.raises(KeyboardInterrupt):
        r.session.offer(tensor, KEY, r.session.context.moment())
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("x") == [tensor.numpy().tobytes()]


def test_one_event_is_waited_for_by_stream_and_run(peer: Peer, rig: MakeRig) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True)
    for n in range(300):
        device.current = n // 100 % 2
        r.offer(torch.zeros(8))
    r.finish()
    [(_, _, after)] = device.fetches
    assert set(map(id, after)) == {id(device.issued[299]), id(device.issued[199])}
    assert len(after) == 2


def test_pieces_have_the_size_that_they_claim(peer: Peer, rig: MakeRig) -> None:
    """A little more than a piece is one copy; a power of two makes whole ones, in an arena at any offset."""
    piece = MIB
    r = rig(FakeDevice(nbytes=16 * MIB), by_hand=True, arena_bytes=64 * MIB, piece_nbytes=piece)
    r.offer(torch.zeros(4096, dtype=torch.uint8))
    for nbytes in (2 * piece, piece + 3000, piece, piece // 2, piece // 2):
        r.finish()
        r.device.fetches.clear()
        r.device.marks.clear()
        r.offer(torch.zeros(nbytes, dtype=torch.uint8))
        r.finish()
        expected = [piece, piece] if nbytes == 2 * piece else [nbytes]
        assert r.device.sizes == expected


def test_a_training_thread_does_not_wait_for_a_copy_to_memory_that_is_not_locked(
    peer: Peer, rig: MakeRig
) -> None:
    """The pump makes it without the lock that training threads need."""
    device = FakeDevice(nbytes=MIB, pinned=False)
    r = rig(device, by_hand=True, ordered=True, arena_bytes=8 * MIB)
    begun, done, fetch = threading.Event(), threading.Event(), device.fetch

    def slow(*args: Any, **more: Any) -> None:
        begun.set()
        done.wait(30)
        fetch(*args, **more)

    device.fetch = slow  # type: ignore[method-assign]
    r.offer(torch.zeros(MIB, dtype=torch.uint8))
    thread = threading.Thread(target=r.stager.advance)
    thread.start()
    begun.wait(30)
    began = time.monotonic()
    r.offer(torch.zeros(MIB, dtype=torch.uint8))  # there is no room, and nothing to take over
    assert time.monotonic() - began < 20
    assert r.session.snapshot().dropped == {"ring_full": 1}
    done.set()
    thread.join()
    r.finish()
    assert r.session.flush(10)


def test_a_held_tensor_that_changed_leaves_nothing_waiting(peer: Peer, rig: MakeRig) -> None:
    """Else every later capture would be issued at once, and the pump never rest."""
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, arena_bytes=32 * MIB)
    tensor = torch.zeros(8 * MIB, dtype=torch.uint8)
    with r.stager.transfers.lock:  # nobody issues it yet
        r.stager.transfers._pumping = True
        r.offer(tensor, immutable=True)
        r.stager.transfers._pumping = False
    tensor.add_(1)
    r.finish()
    assert r.session.snapshot().dropped == {"mutated": 1}
    assert not r.stager.transfers.waiting
