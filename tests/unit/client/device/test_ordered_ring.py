"""A ring that is ordered by the stream: the device waits for room, the host neither waits nor drops."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from capd_client.device import ring_room, transfers
from capd_client.session.session import Session
from tests.kit.client.device import FakeDevice, Rig
from tests.kit.client.peer import Peer, wait_until

MIB = 1 << 20
QUARTER = 1 << 18
MakeRig = Callable[..., Rig]


def part(value: int) -> torch.Tensor:
    """A quarter of a ring of 1 MiB."""
    return torch.full((QUARTER,), value % 256, dtype=torch.uint8)


def values_of(peer: Peer) -> list[int]:
    assert all(len(set(data)) == 1 for data in peer.data_of("x")), "bytes of two captures in one record"
    return [data[0] for data in peer.data_of("x")]


def test_a_host_ahead_of_its_device_neither_drops_nor_waits(peer: Peer, rig: MakeRig) -> None:
    """The device has done nothing of all that when the host is through, and then gets to it."""
    device = FakeDevice(nbytes=MIB, ready=False)
    r = rig(device, by_hand=True, ordered=True, arena_bytes=64 * MIB)
    for n in range(40):
        for event in device.issued:  # what a stream waits for is done before what comes after the wait
            event.happened = True
        r.offer(part(n))
    assert len(device.held_back) == 9  # for all that is in the ring, which is less than one piece
    for event in device.issued:
        event.happened = True
    r.finish()
    assert r.session.flush(10)
    assert r.session.snapshot().dropped == {}
    assert values_of(peer) == list(range(40))


def test_a_stream_waits_for_the_copy_whose_place_it_takes_and_only_where_there_is_no_other(
    peer: Peer, rig: MakeRig
) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, arena_bytes=8 * MIB)
    for n in range(4):
        r.offer(part(n))
    assert device.held_back == []
    r.offer(part(4))
    assert device.held_back == [(0, device.marks[0][1])]
    r.stager.advance()  # that copy is done: its place is the new one's alone
    r.finish()
    assert r.session.flush(10)
    assert values_of(peer) == list(range(5))
    assert r.stager._ring._slots.empty


def test_a_wait_that_is_over_is_not_waited_for_again(peer: Peer, rig: MakeRig) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, arena_bytes=8 * MIB)
    for n in range(5):
        r.offer(part(n))
    r.finish()
    assert r.stager.transfers.gate is None
    r.offer(part(5))
    assert len(device.held_back) == 1


def test_no_stream_waits_for_another_one(peer: Peer, rig: MakeRig) -> None:
    """That one may be waiting for it, by way of another rank: the host waits, as long as it may."""
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, policy="block", max_block_ms=200.0, arena_bytes=8 * MIB)
    for n in range(4):
        r.offer(part(n))
    device.current = 1
    began = time.monotonic()
    r.offer(part(4))
    assert time.monotonic() - began >= 0.19
    assert device.held_back == []
    assert r.session.snapshot().dropped == {"ring_full": 1}
    r.finish()
    for n in range(5, 10):  # the other stream's are home
        r.offer(part(n))
    assert [stream for stream, _ in device.held_back] == [1]
    r.finish()
    assert r.session.flush(10)
    assert values_of(peer) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_room_that_one_stream_waits_for_is_given_to_no_other(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, sleep = threading.Event(), time.sleep

    def asleep(seconds: float) -> None:
        waiting.set()
        sleep(seconds)

    monkeypatch.setattr(ring_room, "time", SimpleNamespace(sleep=asleep, monotonic=time.monotonic))
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, policy="block", max_block_ms=30_000.0, arena_bytes=8 * MIB)
    for n in range(3):
        r.offer(part(n))
    r.offer(torch.full((2 * QUARTER,), 3, dtype=torch.uint8))
    assert r.stager.transfers.gate is not None
    device.current = 1
    thread = threading.Thread(target=r.offer, args=(part(4),))
    thread.start()
    assert waiting.wait(10)
    assert len(device.issued) == 4
    device.run_all()
    while thread.is_alive():
        r.stager.advance()
    assert {stream for stream, _ in device.held_back} == {0}
    r.finish()
    assert r.session.flush(10)
    assert values_of(peer) == [0, 1, 2, 3, 4]


def test_large_ones_and_parts_take_the_same_way(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), ordered=True, policy="block", max_block_ms=30_000.0, arena_bytes=64 * MIB)
    tensors = [torch.randint(256, (n * QUARTER + 7,), dtype=torch.uint8) for n in (1, 9, 2, 14, 3)]
    for tensor in tensors:
        r.offer(tensor)
    assert r.device.held_back
    while r.stager.pending:
        r.device.run_all()
    assert r.session.flush(20)
    assert r.session.snapshot().dropped == {}
    whole: dict[int, bytearray] = {}
    for record in peer.records:
        one = record.descriptor.part
        key = record.descriptor.sequence if one is None else one.record
        whole.setdefault(key, bytearray()).extend(record.data)
    assert [bytes(data) for _, data in sorted(whole.items())] == [
        tensor.numpy().tobytes() for tensor in tensors
    ]


def test_from_an_unlocked_arena_nothing_is_lost(peer: Peer, rig: MakeRig) -> None:
    """No copy to it can be issued ahead: the host waits."""
    r = rig(FakeDevice(nbytes=MIB, pinned=False), ordered=True, policy="block", max_block_ms=30_000.0,
            arena_bytes=64 * MIB)  # fmt: skip
    for n in range(40):
        r.offer(part(n))
    assert r.session.flush(20)
    assert set(r.device.fetched_by) == {"capd-copies"}
    assert r.session.snapshot().dropped == {}
    assert values_of(peer) == list(range(40))


@pytest.mark.parametrize(
    ("settings", "ordered"),
    [
        ({}, False),
        ({"policy": "block"}, True),
        ({"policy": "thin"}, False),
        ({"ring": "wait"}, True),
        ({"policy": "block", "ring": "drop"}, False),
        ({"policy": "block", "max_d2h_gbps": 5.0}, False),  # copies are held back on the host
    ],
)
def test_which_policies_have_the_device_wait(
    peer: Peer, make_session: Callable[..., Session], gpus: object, settings: dict[str, object], ordered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("capd_client.device.devices.CudaDevice", lambda *_, **__: FakeDevice())
    session = make_session(**settings)
    stager = session.devices.stager(torch.device("cuda", 1))
    assert stager._room.ordered is ordered  # type: ignore[union-attr]


def test_the_job_is_not_held_up_by_a_pump_that_is_late(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training threads issue, and take rooms over, without it."""
    monkeypatch.setattr(transfers, "ISSUE_NBYTES", QUARTER)
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, arena_bytes=64 * MIB)
    for n in range(30):
        r.offer(part(n))
    assert set(device.fetched_by) == {"MainThread"}
    assert len(device.fetches) >= 29
    r.finish()
    assert r.session.flush(10)
    assert values_of(peer) == list(range(30))
    wait_until(lambda: not r.session.queue.busy)


def test_places_of_rows_are_not_given_before_their_copies_are_done(peer: Peer, rig: MakeRig) -> None:
    """Nothing on the device waits for those."""
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, payload=False, arena_bytes=8 * MIB)
    for n in range(4):
        r.offer(part(n))
        r.stager.advance()
    taken = [snapshot.slot for piece in r.stager.transfers._under_way for snapshot in piece.ends]
    r.offer(part(4))  # takes the place of a tensor, and another one for its row
    assert device.held_back
    assert r.stager.transfers._due[-1].slot not in taken
    r.finish()
    assert r.session.flush(10)
    assert r.session.snapshot().committed == 5
    for ring in (r.stager._ring, r.stager._rows):
        assert ring._slots.empty


def test_a_stream_takes_over_nothing_that_another_one_handed_over_meanwhile(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, policy="block", max_block_ms=100.0, arena_bytes=8 * MIB)
    r.offer(torch.zeros(2 * QUARTER, dtype=torch.uint8))
    issue_all, others = r.stager.transfers.issue_all, [part(1), part(2)]

    def another() -> None:
        while others:
            r.offer(others.pop())

    def meanwhile() -> None:
        if others:
            device.current, r.stager.transfers._pumping = 1, True  # it leaves issuing to the pump
            thread = threading.Thread(target=another)
            thread.start()
            thread.join()
            device.current, r.stager.transfers._pumping = 0, False
        issue_all()

    monkeypatch.setattr(r.stager.transfers, "issue_all", meanwhile)
    r.offer(torch.full((MIB,), 3, dtype=torch.uint8))  # needs all of the ring
    assert all(stream == 0 for stream, _ in device.held_back)
    assert r.session.snapshot().dropped == {"ring_full": 1}
    r.finish()
    assert r.session.flush(10)


def test_a_wait_keeps_no_tensor_of_the_job(peer: Peer, rig: MakeRig) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, arena_bytes=8 * MIB)
    held = torch.zeros(QUARTER, dtype=torch.uint8)
    alive = weakref.ref(held)
    r.offer(held, immutable=True)
    for n in range(5):
        r.offer(part(n))
    assert device.held_back
    r.finish()
    del held
    device.fetches.clear()
    assert r.session.flush(10)
    gc.collect()
    assert alive() is None


def test_a_wait_for_another_streams_copies_that_was_in_vain_is_not_repeated(peer: Peer, rig: MakeRig) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, policy="block", max_block_ms=1000.0, arena_bytes=8 * MIB)
    for n in range(5):
        r.offer(part(n))
    assert device.held_back
    device.current = 1
    began = time.monotonic()
    for n in range(6):
        r.offer(part(n))
    assert 0.99 < time.monotonic() - began < 5
    assert r.session.snapshot().dropped == {"ring_full": 6}
    r.finish()
    r.offer(part(7))
    r.finish()
    assert r.session.flush(10)
    assert values_of(peer) == [0, 1, 2, 3, 4, 7]


def test_what_the_ring_can_never_hold_takes_nothing_over(peer: Peer, rig: MakeRig) -> None:
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True, ordered=True, payload=False, arena_bytes=8 * MIB)
    r.offer(part(1))
    r.stager.advance()
    r.offer(torch.ones(2 * MIB, dtype=torch.uint8))  # its row is computed where it is
    assert r.stager.transfers.gate is None
    r.finish()
    assert r.session.flush(10)
    assert r.session.snapshot().committed == 2
