"""Device captures through the seam, with a device that delays and reorders what it is asked to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from capd_client.device.ring import ring_nbytes
from capd_client.protocol.counter_page import DropReason
from capd_client.rules.slices import Slice
from capd_client.transport.client_thread import State
from tests.kit.client.device import KEY, FakeDevice, Rig
from tests.kit.client.peer import Peer, wait_until


def test_bytes_are_those_at_capture_time_whatever_happens_to_the_tensor_later(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    r = rig()
    tensor = torch.arange(100.0)
    expected = tensor.clone().numpy().tobytes()

    r.offer(tensor)
    tensor.fill_(-1)
    tensor.untyped_storage().resize_(0)
    r.started(1)
    r.device.run(0)

    assert r.session.flush(10)
    assert peer.data_of("x") == [expected]


def test_captures_become_ready_in_order_when_the_device_finishes_out_of_order(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    r = rig()
    for value in range(4):
        r.offer(torch.full((10,), float(value)))
    r.started(4)

    r.device.run(3)
    assert r.session.snapshot().in_flight == 4
    assert peer.puts == []
    r.device.run(0)
    wait_until(lambda: r.session.snapshot().in_flight == 3)
    assert [sequence for _, sequence in peer.puts] == [1]
    r.device.run(2)
    r.device.run(1)

    assert r.session.flush(10)
    assert [torch.frombuffer(bytearray(d), dtype=torch.float32)[0].item() for d in peer.data_of("x")] == [
        0,
        1,
        2,
        3,
    ]
    assert len(r.device.recycled) == 8


def test_a_later_host_capture_does_not_overtake_one_still_on_the_device(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    r = rig()
    r.offer(torch.zeros(4))
    r.session.offer(torch.ones(4), KEY, r.session.context.moment())
    r.started(1)
    assert peer.puts == []
    r.device.run(0)
    assert r.session.flush(10)
    assert [sequence for _, sequence in peer.puts] == [1, 2]


def test_a_full_ring_drops_and_room_comes_back(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192))
    for _ in range(3):
        r.offer(torch.zeros(128))  # takes 4 KiB
    assert r.session.snapshot().dropped == {"ring_full": 1}
    r.started(2)
    r.device.run(0)
    r.device.run(1)
    assert r.session.flush(10)

    r.offer(torch.zeros(2048))
    r.started(3)
    r.device.run(2)
    assert r.session.flush(10)
    now = r.session.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (4, 3, 0)


def test_what_a_full_ring_drops_leaves_the_budget_to_others(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192), by_hand=True, max_mb_per_step=0.021)
    for kept in (2, 4):
        for _ in range(4):
            r.offer(torch.zeros(1024))
        r.finish()
        assert r.session.flush(10)
        assert r.session.snapshot().committed == kept
    assert r.session.snapshot().dropped == {"ring_full": 4}


def test_a_host_ahead_of_its_device_keeps_as_much_as_the_ring_holds(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    """Room is taken when the host issues a capture: with the link idle all the same."""
    r = rig(FakeDevice(ready=False))
    for _ in range(8):
        r.offer(torch.zeros(r.stager.capacity // 4, dtype=torch.uint8))
    assert r.session.snapshot().dropped == {"ring_full": 4}


def test_policy_block_waits_for_the_ring(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=4096), policy="block", max_block_ms=30_000.0)
    r.offer(torch.zeros(128))
    r.started(1)
    thread = threading.Thread(target=r.offer, args=(torch.ones(128),))
    thread.start()
    wait_until(lambda: r.session.queue.last_sequence == 2)
    assert thread.is_alive()
    r.device.run(0)
    thread.join(10)
    assert not thread.is_alive()
    r.started(2)
    r.device.run(1)
    assert r.session.flush(10)
    assert r.session.snapshot().committed == 2


def test_larger_than_the_ring_is_too_large(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=4096))
    r.offer(torch.zeros(1025))
    assert r.session.snapshot().dropped == {"too_large": 1}


def test_nothing_is_issued_while_a_graph_is_captured(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(capturing=True))
    r.offer(torch.zeros(4))
    assert r.session.snapshot().dropped == {DropReason.STREAM_CAPTURE.value: 1}
    assert r.stager.pending is False


def test_empty_and_strided_and_cast_tensors_take_the_same_way(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig()
    matrix = torch.arange(12.0).view(3, 4)
    r.offer(torch.empty(0, 3))
    r.offer(matrix.t())
    r.offer(matrix[:, ::2], torch.bfloat16)
    r.started(2)
    r.device.run(0)
    r.device.run(1)
    assert r.session.flush(10)
    assert peer.data_of("x") == [
        b"",
        matrix.t().contiguous().numpy().tobytes(),
        matrix[:, ::2].to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes(),
    ]
    assert [record.dtype for record in peer.records] == ["float32", "float32", "bfloat16"]


def test_a_first_capture_in_inference_mode_does_not_spoil_the_later_ones(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    with torch.inference_mode():
        r = rig()
        r.offer(torch.ones(4))
    r.offer(torch.zeros(4))
    r.started(2)
    r.device.run(0)
    r.device.run(1)
    assert r.session.flush(10)
    assert r.session.snapshot().committed == 2


def test_a_thread_of_its_own_does_the_copying(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig()
    r.offer(torch.zeros(4))
    r.started(1)
    r.device.run(0)
    assert r.session.flush(10)
    assert r.device.entered == ["capd-copies"]


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        (30 << 30, 40 << 30, 256 << 20),
        (1 << 30, 40 << 30, int((1 << 30) * 0.05) // 4096 * 4096),
        (74 * 10**9, 74 * 10**9, 256 << 20),
        (75 * 10**9, 75 * 10**9, 1 << 30),
        (20 * 10**9, 80 * 10**9, 4 * 10**8 // 4096 * 4096),
        (10 * 10**9, 80 * 10**9, 256 << 20),  # 2 % were less than a smaller device would give
        (10**9, 80 * 10**9, 5 * 10**7 // 4096 * 4096),
        (0, 80 * 10**9, 0),
        (-1, 80 * 10**9, 0),
    ],
)
def test_the_ring_is_a_share_of_the_free_memory_up_to_a_limit(free: int, total: int, expected: int) -> None:
    assert ring_nbytes(free, total) == expected


def test_a_ring_that_is_asked_for_takes_half_of_the_free_memory_at_most() -> None:
    assert ring_nbytes(30 << 30, 40 << 30, 3 << 30) == 3 << 30
    assert ring_nbytes(30 << 30, 40 << 30, 70_000) == 69632
    assert ring_nbytes(4 << 30, 80 << 30, 3 << 30) == 2 << 30
    assert ring_nbytes(5000, 80 << 30, 1 << 20) == 0


def test_a_slice_is_all_that_crosses_the_ring(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192))
    tensor = torch.arange(4000.0).view(40, 100)
    expected = [tensor[:2].clone(), tensor[:, ::50].contiguous()]
    for text in ("first:2", "stride:50@1"):
        r.offer(tensor, take=Slice(text))
    tensor.fill_(-1)
    r.started(2)
    r.device.run(0)
    r.device.run(1)
    assert r.session.flush(10)
    assert peer.data_of("x") == [kept.numpy().tobytes() for kept in expected]


def test_a_full_ring_thins_the_calls_that_come(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192), policy="thin")
    thinning = r.session.queue.policy.thinning
    assert thinning is not None
    wait_until(lambda: r.session.transport.state is State.RUNNING)  # which ends a thinning
    for _ in range(3):
        assert r.session.keeps(r.session.context.moment())
        r.offer(torch.zeros(128))  # takes 4 KiB
    assert r.session.snapshot().dropped == {"ring_full": 1}
    assert thinning.one_of == 2
