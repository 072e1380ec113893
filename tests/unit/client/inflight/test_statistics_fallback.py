"""Policy `stats`: what finds no room leaves its statistics, and every capture is still counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from capd.store.format.statistics import summarise
from capd_client.device import snapshots
from capd_client.devstats import ROW_DTYPES
from capd_client.inflight.policies import KeepRows
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Moment
from capd_client.session.session import Session
from tests.kit.client.device import FakeDevice, Rig
from tests.kit.client.offering import KEY, Counting, offer
from tests.kit.client.peer import Peer
from tests.kit.client.queues import PAGE, admit, exact, make, send_all
from tests.kit.client.statistics_rows import any_bits, assert_row, daemon_row, ordinary, tensor_of

MakeRig = Callable[..., Rig]
NAMES = sorted(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)


@pytest.fixture
def session(peer: Peer, make_session: Callable[..., Session]) -> Session:
    """No tensor has room."""
    return make_session(strict=True, policy="stats", arena_bytes=16 << 20, max_mb_per_step=0.0)


def rows_of(session: Session, peer: Peer) -> list[np.ndarray]:
    """The rows that arrived, in order; nothing else did, and everything is accounted for."""
    assert session.flush(20)
    now = session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (now.committed, 0, {})
    for record in peer.records:
        assert (record.data, record.descriptor.payload) == (b"", False)
    return [np.frombuffer(record.row, dtype="<f8") for record in peer.records]


@pytest.mark.parametrize("count", [3, 300_000])
def test_without_room_every_dtype_leaves_the_row_that_the_daemon_would_compute(
    count: int, session: Session, peer: Peer
) -> None:
    samples = [(name, make_bits(name, count)) for name in NAMES for make_bits in (ordinary, any_bits)]
    for name, bits in samples:
        offer(session, tensor_of(bits, name))

    rows = rows_of(session, peer)

    assert len(rows) == len(samples)
    for (name, bits), row, record in zip(samples, rows, peer.records, strict=True):
        assert (record.dtype, record.descriptor.shape) == (name, (count,))
        assert_row(row, daemon_row(summarise(bits, name)), bits, name)


def test_views_and_casts_leave_the_row_of_what_would_have_been_kept(session: Session, peer: Peer) -> None:
    source = torch.randn(40, 60, generator=torch.Generator().manual_seed(3))

    offer(session, source.t())
    offer(session, source[:, ::3], cast_to=torch.float16)
    offer(session, torch._neg_view(source))

    kept = [source.numpy(), source[:, ::3].half().numpy(), -source.numpy()]
    for bits, row in zip(kept, rows_of(session, peer), strict=True):
        assert_row(row, daemon_row(summarise(bits, str(bits.dtype))), bits, str(bits.dtype))


def test_what_has_room_is_kept_whole(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session(strict=True, policy="stats", arena_bytes=16 << 20, max_mb_per_step=0.001)
    for iteration in (0, 0, 0, 1):
        session.offer(torch.ones(100), KEY, Moment(iteration))

    assert session.flush(20)
    assert [record.descriptor.payload for record in peer.records] == [True, True, False, True]
    assert [len(record.data) for record in peer.records] == [400, 400, 0, 400]


def test_larger_than_the_arena_leaves_its_row(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session(strict=True, policy="stats", arena_bytes=1 << 20)

    offer(session, torch.full((3 << 20,), 2.0, dtype=torch.bfloat16))

    [row] = rows_of(session, peer)
    assert row[[0, 4, 5, 7]].tolist() == [3 << 20, 2.0, 2.0, 6 << 20]


def test_64_bit_integers_are_dropped_as_ever(session: Session) -> None:
    offer(session, torch.arange(9))

    assert session.snapshot().dropped == {DropReason.STEP_BUDGET.value: 1}


def test_it_is_told_once_with_the_settings_to_raise(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        offer(session, torch.ones(100))

    [line] = [record.getMessage() for record in caplog.records]
    assert "CAPD_ARENA_BYTES" in line
    assert "policy stats" in line


def test_the_job_does_not_see_how_statistics_are_computed(session: Session, peer: Peer) -> None:
    state = torch.get_rng_state()
    weights = torch.ones(300, 20, requires_grad=True)
    with Counting() as mode, torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        offer(session, weights)
        offer(session, weights.detach().t())
    with torch.inference_mode():
        offer(session, torch.ones(6000))

    assert mode.seen == ["aten.detach.default", "aten.t.default"]  # the job's own
    assert torch.equal(torch.get_rng_state(), state)
    assert [row[7] for row in rows_of(session, peer)] == [6000.0] * 3
    assert weights.grad is None


def broken(*_: Any) -> None:
    raise RuntimeError("no statistics today")


def test_an_error_while_computing_is_a_counted_drop(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(policy="stats", arena_bytes=16 << 20, max_mb_per_step=0.0)
    monkeypatch.setattr("capd_client.staging.stager.fill_row", broken)

    offer(session, torch.ones(100))  # the way of small tensors
    offer(session, torch.ones(10, 10).t())

    assert session.snapshot().dropped == {DropReason.INTERNAL.value: 2}
    assert session.flush(20)
    assert peer.records == []


def test_every_end_of_a_reduced_capture_keeps_the_sum() -> None:
    queue, definition = make(pages=4, policy=KeepRows())
    whole, *reduced = [admit(queue, definition, 3 * PAGE) for _ in range(2)]
    dropped = admit(queue, definition, 3 * PAGE)  # not even a row has room

    assert whole is not None
    assert dropped is None
    [row] = reduced
    assert row is not None
    descriptor = row.descriptor
    assert (descriptor.nbytes, descriptor.payload, descriptor.row_offset) == (0, False, row.slot[0])
    assert queue.snapshot().dropped == {"arena_full": 1}
    assert exact(queue)

    for capture in (whole, row):
        queue.ready(capture)
    assert send_all(queue) == [1, 2]
    queue.acknowledged([(2, 2)])
    assert exact(queue)
    again = admit(queue, definition, 3 * PAGE)
    assert again is not None
    assert again.descriptor.row_offset == descriptor.row_offset  # the row's slot was free again
    assert queue.close(DropReason.NOT_CONNECTED) == 2
    assert admit(queue, definition, 3 * PAGE) is None
    now = queue.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (5, 1, 0)
    assert now.dropped == {"arena_full": 1, "not_connected": 3}
    lost = queue.ledger.row(definition.id, DropReason.NOT_CONNECTED)
    assert lost is not None
    assert lost.nbytes == 3 * 3 * PAGE  # of the tensors, whatever would have been kept of them


def device_rows(r: Rig, peer: Peer) -> list[np.ndarray]:
    """The rows that came home from the fake device; empty ones beside whole tensors."""
    r.finish()
    assert r.session.flush(20)
    now = r.session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (now.committed, 0, {})
    return [np.frombuffer(record.row, dtype="<f8") for record in peer.records]


def test_on_a_device_what_has_no_room_in_the_arena_leaves_its_row(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=1 << 20), by_hand=True, policy="stats", max_mb_per_step=0.0)
    source = torch.randn(50, 60, generator=torch.Generator().manual_seed(4))

    r.offer(source.t())
    r.offer(source, torch.bfloat16)
    r.offer(source, immutable=True)

    plain, cast, held = device_rows(r, peer)
    bits = source.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert_row(plain, daemon_row(summarise(source.numpy(), "float32")), source.numpy(), "float32")
    assert_row(cast, daemon_row(summarise(bits, "bfloat16")), bits, "bfloat16")
    assert_row(held, plain, source.numpy(), "float32")
    assert [record.descriptor.payload for record in peer.records] == [False] * 3


def test_what_is_larger_than_the_ring_leaves_its_row(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=8192), by_hand=True, policy="stats")

    r.offer(torch.full((100, 100), 3.0))

    [row] = device_rows(r, peer)
    assert row[[0, 4, 7]].tolist() == [10_000, 3.0, 30_000]


def test_a_full_ring_may_still_have_room_for_a_row(
    peer: Peer, rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    r = rig(FakeDevice(nbytes=1 << 15), by_hand=True, policy="stats")
    whole, reduced = torch.full((6000,), 1.0), torch.full((6000,), 2.0)

    r.offer(whole)
    r.offer(reduced)

    _, row = device_rows(r, peer)
    assert [record.descriptor.payload for record in peer.records] == [True, False]
    assert peer.records[0].data == whole.numpy().tobytes()
    assert row[[0, 4, 7]].tolist() == [6000, 2.0, 12_000]
    assert "policy stats" in caplog.text


def test_a_tensor_that_the_ring_reduced_to_its_row_leaves_the_budget_to_others(
    peer: Peer, rig: MakeRig
) -> None:
    r = rig(FakeDevice(nbytes=1 << 15), by_hand=True, policy="stats", max_mb_per_step=0.06)

    for _ in range(2):
        r.offer(torch.ones(6000))
    r.finish()
    r.offer(torch.ones(6000))
    r.finish()

    assert r.session.flush(20)
    assert [record.descriptor.payload for record in peer.records] == [True, False, True]


def test_a_full_ring_without_room_for_a_row_is_a_counted_drop(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_ROWS_NBYTES", 4096)  # room for one
    r = rig(FakeDevice(nbytes=1 << 15), by_hand=True, policy="stats")

    r.offer(torch.ones(8192))  # all of the ring
    r.offer(torch.ones(6000))  # reduced to its row
    r.offer(torch.ones(6000))
    r.offer(torch.arange(6000))  # 64-bit integers

    assert r.session.snapshot().dropped == {DropReason.RING_FULL.value: 1, DropReason.TOO_LARGE.value: 1}
    r.finish()
    assert r.session.flush(20)
