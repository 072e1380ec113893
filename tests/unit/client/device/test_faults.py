"""Devices that fail, several of them, and threads that wait for room: every capture counted once, no slot shared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capd_client.device import pieces, snapshots, transfers
from capd_client.device.ring import Ring, RingMemory
from capd_client.protocol.counter_page import DropReason
from tests.kit.client.device import KEY, FakeDevice, Rig
from tests.kit.client.peer import Peer, wait_until

MIB = 1 << 20
MakeRig = Callable[..., Rig]
BROKEN = RuntimeError("CUDA error: unspecified launch failure")


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# -- failure ------------------------------------------------------------------------------------------------


def test_a_device_error_drops_what_was_under_way_and_the_session_lives_on(peer: Peer, rig: MakeRig) -> None:
    r = rig()
    r.device.fault = BROKEN
    r.offer(torch.zeros(4))
    wait_until(lambda: r.stager.failed)
    r.offer(torch.zeros(4))
    r.session.offer(torch.ones(4), KEY, r.session.context.moment())
    assert r.session.flush(10)
    now = r.session.snapshot()
    assert (now.offered, now.committed, now.dropped) == (3, 1, {"internal": 2})


def test_slots_that_a_failed_device_may_still_write_are_given_to_nobody_else(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1 << 16)
    monkeypatch.setattr(transfers, "AHEAD_NBYTES", 1 << 17)
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    free = r.session.queue.slots.free_nbytes
    for _ in range(4):
        r.offer(torch.full((1 << 16,), 1, dtype=torch.uint8))
    r.offer(torch.full((3 << 16,), 1, dtype=torch.uint8))
    r.stager.advance()
    r.device.run(0)
    r.stager.advance()
    assert len(r.device.fetches) == 3  # the first one is home, two are under way, two were not begun
    r.stager.fail()

    assert r.session.flush(10)
    now = r.session.snapshot()
    assert (now.offered, now.committed, now.in_flight, now.dropped) == (5, 1, 0, {"internal": 4})
    assert r.session.queue.slots.free_nbytes == free - 2 * (1 << 16)
    others = [torch.full((1 << 16,), 2, dtype=torch.uint8)] * 8
    for tensor in others:
        r.session.offer(tensor, KEY, r.session.context.moment())
    r.device.run_all()  # the copies that were under way come late
    assert r.session.flush(10)
    assert peer.data_of("x")[1:] == [tensor.numpy().tobytes() for tensor in others]


def test_a_capture_whose_first_pieces_are_under_way_keeps_its_slot_too(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1 << 12)
    monkeypatch.setattr(transfers, "AHEAD_NBYTES", 1 << 13)
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    free = r.session.queue.slots.free_nbytes
    r.offer(torch.zeros(1 << 16, dtype=torch.uint8))
    r.stager.advance()
    r.stager.fail()

    assert r.session.snapshot().dropped == {"internal": 1}
    assert r.session.queue.slots.free_nbytes == free - (1 << 16)


@pytest.mark.parametrize("call", ["fetch", "fetched", "query", "enter_thread", "recycle"])
def test_whatever_call_fails_every_capture_is_counted_once(peer: Peer, rig: MakeRig, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BROKEN

    device = FakeDevice(pinned=call != "recycle")  # unpinned copies are done at once
    setattr(device, call, fail)
    r = rig(device)
    for _ in range(3):
        r.offer(torch.zeros(64))
    wait_until(lambda: r.stager.failed)
    r.offer(torch.zeros(64))
    wait_until(lambda: r.session.snapshot().in_flight == 0)
    now = r.session.snapshot()
    assert (now.offered, now.committed, now.dropped) == (4, 0, {"internal": 4})
    assert not r.stager.pending


@pytest.mark.parametrize(
    ("behind", "payload", "immutable", "ring_nbytes"),
    [(step, True, False, MIB) for step in ("take", "write", "record")]
    + [(step, False, False, MIB) for step in ("take", "write", "record")]
    + [(step, False, False, 4096) for step in ("take", "row", "fill_row", "record")]
    + [("record", True, True, MIB)],
)
def test_a_capture_that_a_failing_device_meets_half_way_is_one_drop(
    peer: Peer,
    rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    behind: str,
    payload: bool,
    immutable: bool,
    ring_nbytes: int,
) -> None:
    """The device fails on the pump's thread right after one of the steps of the capturing thread."""
    r = rig(FakeDevice(nbytes=ring_nbytes), by_hand=True, payload=payload)
    slots = r.session.queue.slots
    memory = weakref.ref(r.stager._ring._memory.tensor)  # type: ignore[union-attr]
    owners = {"take": Ring, "write": RingMemory, "row": RingMemory, "fill_row": snapshots, "record": r.device}
    owner = owners[behind]
    step = getattr(owner, behind)

    def step_and_fail(*args: Any) -> Any:
        result = step(*args)
        thread = in_thread(r.stager.fail)
        thread.join()
        return result

    monkeypatch.setattr(owner, behind, step_and_fail)
    r.offer(torch.zeros(1 << 15), immutable=immutable)
    assert r.stager.failed
    now = r.session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (1, 0, {"internal": 1})
    row = r.session.queue.ledger.row(0, DropReason.INTERNAL)
    assert row is not None
    assert row.count == 1
    assert slots.take(slots.capacity) is not None
    assert memory() is None


def test_a_device_that_fails_in_front_of_the_books_is_a_drop_of_the_key(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig(by_hand=True)

    def fail() -> bool:
        raise BROKEN

    monkeypatch.setattr(r.device, "is_capturing", fail)
    r.session._stager = r.way
    with pytest.raises(RuntimeError, match="unspecified launch failure"):  # as CAPD_STRICT has it
        r.session.offer(torch.zeros(64), KEY, r.session.context.moment())
    row = r.session.queue.ledger.row(0, DropReason.INTERNAL)
    assert row is not None
    assert (row.count, row.nbytes) == (1, 256)
    assert r.session.snapshot().dropped == {"internal": 1}


def test_a_failed_device_gives_its_memory_back(peer: Peer, rig: MakeRig) -> None:
    r = rig(by_hand=True)
    memory = weakref.ref(r.stager._ring._memory.tensor)  # type: ignore[union-attr]
    r.offer(torch.zeros(64))
    assert memory() is not None
    r.stager.fail()
    assert memory() is None


def test_what_still_writes_to_the_memory_of_a_failed_device_keeps_it(peer: Peer, rig: MakeRig) -> None:
    """A block that the allocator has back may be somebody else's."""
    r = rig(by_hand=True)
    memory = weakref.ref(r.stager._ring._memory.tensor)  # type: ignore[union-attr]
    taken = r.stager._ring.take(256, 0.0)
    assert taken is not None
    slot, writable = taken
    r.stager.fail()
    assert memory() is not None
    writable.write(slot, torch.ones(64), torch.float32)
    assert writable.flat(slot[0], 64, torch.float32).eq(1.0).all()
    del taken, writable
    assert memory() is None


def test_a_capture_that_is_given_up_keeps_its_place_for_a_copy_that_is_still_due(
    peer: Peer, rig: MakeRig
) -> None:
    """At the begin of the arena are its counters."""
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    r.offer(torch.full((1000,), 255, dtype=torch.uint8))
    [capture] = r.session.queue._live.offers.values()
    r.session.queue.abandon(capture, DropReason.INTERNAL)
    r.stager.advance()
    [(_, host, _)] = r.device.fetches
    assert host.data_ptr() >= r.session.arena.address + r.session.arena.start
    r.finish()


# -- waiting ------------------------------------------------------------------------------------------------


def blocked(r: Rig) -> threading.Thread:
    """A thread that waits for room in the ring."""
    r.offer(torch.zeros(1024))
    thread = in_thread(lambda: r.offer(torch.ones(1024)))
    wait_until(lambda: r.session.queue.last_sequence == 2)
    assert thread.is_alive()
    return thread


def test_who_waits_for_room_is_released_when_the_device_fails(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, policy="block", max_block_ms=60_000.0)
    thread = blocked(r)
    r.stager.fail()
    thread.join(10)
    assert not thread.is_alive()
    assert r.session.snapshot().dropped == {"internal": 2}


def test_who_waits_for_room_is_released_when_the_session_closes(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, policy="block", max_block_ms=60_000.0)
    r.session.devices.stagers.append(r.stager)
    thread = blocked(r)
    r.session.close(0.0)
    thread.join(10)
    assert not thread.is_alive()
    now = r.session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (2, 0, {"not_connected": 2})


def waits_of(r: Rig) -> list[float]:
    """The waits for room in the ring that begin from now on, in seconds."""
    waits: list[float] = []
    room = r.stager._ring._waiting._room
    wait = room.wait

    def counted(timeout: float | None = None) -> bool:
        waits.append(timeout or 0.0)
        return wait(timeout)

    room.wait = counted  # type: ignore[method-assign]
    return waits


def test_a_ring_that_stays_full_costs_one_wait_and_not_one_per_capture(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, policy="block", max_block_ms=50.0)
    waits = waits_of(r)
    for _ in range(5):
        r.offer(torch.zeros(1024))
    assert r.session.snapshot().dropped == {"ring_full": 4}
    assert len(waits) == 1

    r.finish()
    for _ in range(3):
        r.offer(torch.zeros(1024))
    assert len(waits) == 2


def test_what_the_arena_left_of_a_wait_keeps_nobody_else_from_waiting_for_the_ring(
    peer: Peer, rig: MakeRig
) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, policy="block", max_block_ms=2000.0)
    waits = waits_of(r)
    r.offer(torch.zeros(1024))
    whole = r.stager.deadline
    r.stager.deadline = lambda: whole() - 1.99  # type: ignore[method-assign]
    r.offer(torch.zeros(1024))
    r.stager.deadline = whole  # type: ignore[method-assign]
    r.offer(torch.zeros(1024))
    r.offer(torch.zeros(1024))
    assert r.session.snapshot().dropped == {"ring_full": 3}
    assert len([wait for wait in waits if wait > 0.5]) == 1


def test_waiting_for_arena_and_ring_together_takes_no_longer_than_allowed(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, policy="block", max_block_ms=60_000.0)
    r.offer(torch.zeros(1024))
    deadline = r.stager.deadline() - 60.0  # as if the arena had taken all of it
    r.stager.deadline = lambda: deadline  # type: ignore[method-assign]
    r.offer(torch.zeros(1024))
    assert r.session.snapshot().dropped == {"ring_full": 1}


# -- several devices ----------------------------------------------------------------------------------------


def test_two_devices_in_two_threads_are_exact(peer: Peer, rig: MakeRig) -> None:
    first = rig(arena_bytes=8 * MIB)
    second = rig(session=first.session)
    count = 60

    def capture(r: Rig, sign: int) -> None:
        for n in range(1, count + 1):
            while r.stager._ring._slots.free_nbytes < 4096:  # so that none is dropped
                r.device.run_all()
            r.offer(torch.full((16,), float(sign * n)))

    threads = [in_thread(lambda: capture(first, 1)), in_thread(lambda: capture(second, -1))]
    while any(thread.is_alive() for thread in threads) or first.stager.pending or second.stager.pending:
        first.device.run_all()
        second.device.run_all()
    for thread in threads:
        thread.join()

    assert first.session.flush(20)
    now = first.session.snapshot()
    assert (now.offered, now.committed, now.dropped) == (2 * count, 2 * count, {})
    values = [torch.frombuffer(bytearray(data), dtype=torch.float32)[0].item() for data in peer.data_of("x")]
    assert [value for value in values if value > 0] == [float(n) for n in range(1, count + 1)]
    assert [value for value in values if value < 0] == [-float(n) for n in range(1, count + 1)]


def test_a_failed_device_leaves_the_other_alone(peer: Peer, rig: MakeRig) -> None:
    first = rig()
    second = rig(session=first.session)
    first.device.fault = BROKEN
    for r in (first, second):
        r.offer(torch.zeros(16))
    wait_until(lambda: first.stager.failed)
    second.started(1)
    second.device.run_all()
    assert first.session.flush(10)
    second.offer(torch.ones(16))
    second.started(2)
    second.device.run_all()
    assert first.session.flush(10)

    now = first.session.snapshot()
    assert (now.offered, now.committed, now.dropped) == (3, 2, {"internal": 1})
