"""One GPU through the seam, with torch.cuda faked: streams, events, copies, and whose device is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from capd_client.device.cuda import runtime
from capd_client.device.cuda.device import CudaDevice
from capd_client.device.pieces import Piece
from capd_client.process.log import RateLimitedLog
from capd_client.session.session import Session
from tests.kit.client.cuda import FakeStream, Gpus
from tests.kit.client.device import KEY, AlwaysDevice
from tests.kit.client.peer import Peer, wait_until

DEVICE = torch.device("cuda", 1)


def made() -> CudaDevice:
    return CudaDevice(DEVICE, lambda _: 1 << 62, lambda: False, RateLimitedLog())


def test_a_fetch_waits_for_all_its_events_on_the_side_stream_and_copies(gpus: Gpus) -> None:
    device = made()
    side: Any = device._stream
    device.enter_thread()
    assert gpus.current_stream(1) is side
    events = [device.record(), device.record()]
    source, host = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    side.log.clear()
    device.fetch(Piece(source, 0, 8, 0, events), host)
    done = device.fetched()

    assert torch.equal(source, host)
    assert side.log == ["wait stream of 1", "wait stream of 1", "record"]
    assert done.recorded_on == "stream of 1"
    assert device.query(done) is True


@pytest.mark.parametrize("pinned", [False, True])
def test_no_copy_is_one_that_sync_debug_mode_forbids(gpus: Gpus, pinned: bool) -> None:
    """The mode is the process's: where a job sets "error", torch's waiting copy would raise in the client thread."""
    asked: list[bool] = []

    class Host(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            asked.append(non_blocking)
            return self

    device = made()
    source, host = torch.zeros(8), torch.zeros(8).as_subclass(Host)
    device.fetch(Piece(source, 0, 8, 0, (), pinned=pinned), host)
    assert asked == [True]


def test_events_are_used_again(gpus: Gpus) -> None:
    device = made()
    for _ in range(100):
        events = [device.record(), device.fetched()]
        for event in events:
            device.recycle(event)
    assert gpus.events_made == 2


def test_the_ring_comes_from_the_side_streams_pool_and_may_be_empty(
    gpus: Gpus, allocated: list[tuple[torch.device, FakeStream]]
) -> None:
    device = made()
    assert device.allocate_ring().numel() == 0
    gpus.free = 10 << 20
    assert device.allocate_ring().numel() == 524288
    assert set(allocated) == {(DEVICE, device._stream)}
    assert set(gpus.default[1].log) == {"wait stream of 1"}  # for what the side stream has in its queue
    assert (gpus.current, gpus.current_stream(1)) == (0, gpus.default[1])


def test_what_torch_holds_unused_is_free_memory_and_where_it_lies_in_pieces_the_drivers_is_taken(
    gpus: Gpus, allocated: list[tuple[torch.device, FakeStream]]
) -> None:
    gpus.free, gpus.unused = 10 << 20, 10 << 20
    assert runtime.ring_sizes(1) == (1 << 20, 524288, 0)
    assert runtime.ring_sizes(1, asked=4 << 20) == (4 << 20, 0)
    assert made().allocate_ring().numel() == 1 << 20

    gpus.unused = 20 << 20  # 1.5 MiB is more than can be had at once
    assert made().allocate_ring().numel() == 524288


def test_an_allocator_without_statistics_has_nothing_unused(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(index: int) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_reserved", none)
    gpus.free, gpus.unused = 10 << 20, 10 << 20
    assert runtime.ring_sizes(1) == (524288, 0)


def test_no_thread_of_capd_makes_a_context_on_a_gpu_of_another_rank(
    peer: Peer,
    make_session: Callable[..., Session],
    gpus: Gpus,
    allocated: list[tuple[torch.device, FakeStream]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a gigabyte each on GPU 0, from every rank of the node, as long as threads begin there."""
    gpus.free = 10 << 20
    session = make_session(strict=True)
    session.arena.prefaulted()
    stager = session.devices.stager(DEVICE)
    wait_until(lambda: session.devices.pinned)
    session._stager = AlwaysDevice(session.queue, session.arena, session.notices, lambda _: stager)
    for _ in range(3):
        session.offer(torch.ones(64), KEY, session.context.moment())
    assert session.flush(20)
    assert session.snapshot().committed == 3
    session.close()

    assert {name for name, _ in gpus.calls} >= {"query", "mode", "register", "unregister"}
    assert gpus.contexts == {1}


def test_the_capture_check_is_of_the_tensors_device_whatever_is_current(gpus: Gpus) -> None:
    device = made()
    assert gpus.current == 0
    gpus.capturing = {0}
    assert not device.is_capturing()
    gpus.capturing = {1}
    assert device.is_capturing()
    assert gpus.current == 0
    assert gpus.contexts <= {1}


def test_snapshots_are_ordered_by_the_tensors_device_whatever_is_current(gpus: Gpus) -> None:
    device = made()
    event = device.record()
    assert event.recorded_on == "stream of 1"
    device.hold_back(event)
    assert gpus.default[1].log == ["record", "wait stream of 1"]
    assert gpus.default[0].log == []
    assert device.stream() == gpus.default[1].cuda_stream


def test_without_raw_calls_training_threads_leave_copies_and_questions_to_the_pump(gpus: Gpus) -> None:
    """Issuing would change their current stream; asking would end a graph capture of another thread."""
    device = made()
    assert not device.can_issue()
    done = device.fetched()
    assert not device.query(done)
    assert not [name for name, _ in gpus.calls if name == "query"]
    device.enter_thread()
    assert device.query(done)


def test_waiting_for_a_copy_is_the_events_own_waiting(gpus: Gpus) -> None:
    device = made()
    device.enter_thread()
    device.wait(device.fetched())
    assert ("synchronize", 1) in gpus.calls


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_not_locked_goes_by_way_of_buffers_that_are(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Where those are refused, straight."""
    empty, pinned_nbytes = torch.empty, []

    def allocate(*size: int, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            if refused:
                raise RuntimeError("CUDA error: out of memory")
            pinned_nbytes.append(size[0])
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", allocate)
    device = made()
    device.enter_thread()
    source = torch.randint(256, (20 << 20,), dtype=torch.uint8)
    host = torch.zeros_like(source)
    device.fetch(Piece(source, 0, source.numel(), 0, (device.record(),), pinned=False), host)
    assert torch.equal(source, host)
    assert pinned_nbytes == ([] if refused else [8 << 20, 8 << 20])
    assert gpus.events_made == (1 if refused else 3)  # those of its parts are used again
