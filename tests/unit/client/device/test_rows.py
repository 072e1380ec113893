"""Statistics of device captures: where no payload is kept the row travels alone, computed by the copy pump."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from capd_client.arena.allocator import SMALL_NBYTES
from capd_client.device import snapshots
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.statistics_row import ROW_NBYTES
from tests.kit.client.device import KEY, FakeDevice, Rig
from tests.kit.client.peer import Peer, wait_until
from tests.kit.client.statistics_rows import any_bits, assert_row, reference, tensor_of

MIB = 1 << 20
MakeRig = Callable[..., Rig]


def row_of(r: Rig, peer: Peer, index: int = 0) -> torch.Tensor:
    """The row of a record, where its descriptor says that it is; nothing has taken that place since."""
    offset = peer.records[index].descriptor.row_offset
    assert offset is not None
    assert offset % 8 == 0
    arena = torch.frombuffer(r.session.arena.buffer, dtype=torch.uint8)
    return arena[offset : offset + ROW_NBYTES].view(torch.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "bool", "int32", "float16"])
def test_without_a_payload_the_row_is_all_that_travels(peer: Peer, rig: MakeRig, dtype: str) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, payload=False)
    bits = any_bits(dtype, 40_000)
    tensor = tensor_of(bits, dtype).view(200, 200).t()
    r.offer(tensor)
    r.finish()

    assert r.device.sizes == [ROW_NBYTES]
    assert r.session.flush(10)
    descriptor = peer.records[0].descriptor
    assert (descriptor.payload, descriptor.nbytes, descriptor.shape) == (False, 0, (200, 200))
    assert_row(row_of(r, peer).numpy(), reference(bits, dtype), bits, dtype)


def test_rows_without_payload_share_copies(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, payload=False)
    for n in range(10):
        r.offer(torch.full((1000,), float(n)))
    r.finish()
    assert len(r.device.fetches) == 1
    assert r.session.flush(10)
    for n in range(10):
        row = row_of(r, peer, n)
        assert row[:9].tolist() == [1000, 0, 0, 1000.0 * (n == 0), n, n, n, 1000.0 * n, 1000.0 * n * n]


def test_a_tensor_larger_than_the_ring_has_statistics_all_the_same(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=8192), by_hand=True, payload=False)
    r.offer(torch.ones(MIB))
    r.finish()
    assert r.session.flush(10)
    assert row_of(r, peer)[0].item() == MIB


def test_a_training_thread_computes_no_row(peer: Peer, rig: MakeRig) -> None:
    """It copies; the pump computes of the copies, however many bytes are due."""
    r = rig(FakeDevice(nbytes=8 * MIB), payload=False, arena_bytes=8 * MIB)
    for n in range(4):
        tensor = torch.full((MIB,), n, dtype=torch.uint8)
        r.offer(tensor)
        tensor.zero_()
    wait_until(lambda: len(r.device.marks) >= 1)
    while r.stager.pending:
        r.device.run_all()
    assert r.session.flush(10)
    assert set(r.device.computed_by) == set(r.device.fetched_by) == {"capd-copies"}
    assert [row_of(r, peer, n)[4].item() for n in range(4)] == [0, 1, 2, 3]


def test_rows_give_their_room_back(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, payload=False)
    for n in range(40):
        r.offer(torch.full((MIB // 2,), n, dtype=torch.uint8))
        r.finish()
    assert r.session.flush(10)
    assert r.session.snapshot().committed == 40
    for ring in (r.stager._ring, r.stager._rows):
        assert ring._slots.empty


def test_where_a_tensor_is_kept_no_row_is_computed_here(peer: Peer, rig: MakeRig) -> None:
    """Small tensors and large ones; 64-bit integers, which are no float64, also without payload; empty ones."""
    kept = rig(FakeDevice(nbytes=4 * MIB), by_hand=True, arena_bytes=8 * MIB)
    for tensor in (torch.ones(8), torch.ones(SMALL_NBYTES), torch.ones(SMALL_NBYTES, dtype=torch.int64)):
        kept.offer(tensor)
    kept.finish()
    session = kept.session
    alone = rig(FakeDevice(nbytes=4 * MIB), by_hand=True, session=session, payload=False)
    alone.offer(torch.arange(SMALL_NBYTES))
    alone.offer(torch.empty(0))
    alone.finish()

    assert session.flush(10)
    assert kept.device.computed_by == alone.device.computed_by == []
    assert [record.descriptor.row_offset for record in peer.records] == [None] * 5
    assert [record.descriptor.payload for record in peer.records] == [True] * 3 + [False] * 2
    assert peer.records[3].data == torch.arange(SMALL_NBYTES).numpy().tobytes()
    assert peer.records[4].descriptor.nbytes == 0


def test_an_error_amid_a_row_is_one_drop(peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, payload=False)

    def broken(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(snapshots, "fill_row", broken)
    with pytest.raises(Exception, match=r"^$"):
        r.offer(torch.randn(SMALL_NBYTES // 4))
    r.finish()
    assert r.session.flush(10)
    assert r.session.snapshot().dropped == {"internal": 1}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", ["full", "stats"])
def test_a_drop_has_its_tensors_bytes_wherever_it_is_and_whatever_would_be_kept(
    peer: Peer, rig: MakeRig, mode: str, on_device: bool
) -> None:
    r = rig(by_hand=True, payload=mode == "full", mode=mode)
    offer = r.offer if on_device else partial(r.session.offer, key=KEY, moment=Moment())
    r.session.queue.take_offers(False)
    offer(torch.zeros(30, 10))
    r.session.queue.take_offers(True)
    r.stager.transfers.failed = True
    r.offer(torch.zeros(50))
    rows = {DropReason.STOPPED: 1200, DropReason.INTERNAL: 200}
    for reason, nbytes in rows.items():
        row = r.session.queue.ledger.row(0, reason)
        assert row is not None
        assert (row.count, row.nbytes) == (1, nbytes)
