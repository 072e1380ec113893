"""Statistics of device captures: the row travels alone where no payload is kept, behind it where a kernel is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from client_peer import Peer
from fake_device import KEY, FakeDevice, Rig
from statistics_rows import any_bits, assert_row, reference, tensor_of

from capd_client import device
from capd_client.allocator import SMALL_NBYTES
from capd_client.counter_page import DropReason
from capd_client.key import Moment
from capd_client.statistics_row import ROW_NBYTES, ROW_VALUES

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


@pytest.mark.parametrize("cast_to", [None, torch.bfloat16])
def test_the_row_travels_behind_the_payload_in_the_same_copy(
    peer: Peer, rig: MakeRig, cast_to: torch.dtype | None
) -> None:
    r = rig(FakeDevice(nbytes=4 * MIB), by_hand=True, has_kernel=True, arena_bytes=8 * MIB)
    tensor = torch.randn(SMALL_NBYTES // 2 + 3, 1)
    expected = tensor.clone().to(cast_to or tensor.dtype)
    r.offer(tensor, cast_to)
    tensor.zero_()
    r.finish()

    nbytes = expected.nbytes
    assert r.device.sizes == [-(-nbytes // 8) * 8 + ROW_NBYTES]
    assert r.session.flush(10)
    record = peer.records[0]
    assert record.descriptor.payload
    assert record.data == expected.view(torch.uint8).numpy().tobytes()
    assert record.descriptor.row_offset == record.descriptor.offset + -(-nbytes // 8) * 8
    row = row_of(r, peer)
    assert len(row) == ROW_VALUES
    assert row[0].item() == expected.numel()
    assert row[7].item() == pytest.approx(expected.double().sum().item())


def test_bytes_that_are_no_multiple_of_eight_end_before_an_aligned_row(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, has_kernel=True)
    tensors = [torch.randint(256, (SMALL_NBYTES + n,), dtype=torch.uint8) for n in (1, 7, 8)]
    for tensor in tensors:
        r.offer(tensor)
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("x") == [tensor.numpy().tobytes() for tensor in tensors]
    for n, tensor in enumerate(tensors):
        assert row_of(r, peer, n)[0].item() == tensor.numel()


def test_the_daemon_computes_where_it_is_cheaper_or_the_rank_cannot(peer: Peer, rig: MakeRig) -> None:
    """Small tensors; dtypes without a kernel; 64-bit integers, which are no float64; held ones; empty ones."""
    with_kernel = rig(FakeDevice(nbytes=4 * MIB), by_hand=True, has_kernel=True, arena_bytes=8 * MIB)
    with_kernel.offer(torch.ones(8))
    with_kernel.offer(torch.ones(SMALL_NBYTES, dtype=torch.int64))
    with_kernel.offer(torch.ones(SMALL_NBYTES), immutable=True)
    with_kernel.finish()
    session = with_kernel.session
    alone = rig(FakeDevice(nbytes=4 * MIB), by_hand=True, session=session, payload=False)
    alone.offer(torch.arange(SMALL_NBYTES))
    alone.offer(torch.empty(0))
    alone.finish()
    without = rig(FakeDevice(nbytes=4 * MIB), by_hand=True, session=session)
    without.offer(torch.ones(SMALL_NBYTES))
    without.finish()

    assert with_kernel.session.flush(10)
    assert [record.descriptor.row_offset for record in peer.records] == [None] * 6
    assert [record.descriptor.payload for record in peer.records] == [True] * 3 + [False] * 2 + [True]
    assert peer.records[3].data == torch.arange(SMALL_NBYTES).numpy().tobytes()
    assert peer.records[4].descriptor.nbytes == 0


def test_a_tensor_that_fits_only_without_its_row_goes_without(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, has_kernel=True, arena_bytes=8 * MIB)
    r.offer(torch.zeros(MIB, dtype=torch.uint8))
    r.finish()
    assert r.session.flush(10)
    assert peer.records[0].descriptor.row_offset is None
    assert len(peer.records[0].data) == MIB


@pytest.mark.parametrize("payload", [True, False])
def test_an_error_costs_the_row_alone_where_the_payload_travels(
    peer: Peer, rig: MakeRig, payload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, has_kernel=True, payload=payload)

    def broken(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(device, "fill_row", broken)
    tensor = torch.randn(SMALL_NBYTES // 4)
    if payload:
        r.offer(tensor)
    else:
        with pytest.raises(Exception, match=r"^$"):
            r.offer(tensor)
    r.finish()
    assert r.session.flush(10)
    if payload:
        assert peer.records[0].data == tensor.numpy().tobytes()
        assert peer.records[0].descriptor.row_offset is None
    else:
        assert r.session.snapshot().dropped == {"internal": 1}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", ["full", "stats"])
def test_a_drop_has_its_tensors_bytes_wherever_it_is_and_whatever_would_be_kept(
    peer: Peer, rig: MakeRig, mode: str, on_device: bool
) -> None:
    r = rig(by_hand=True, payload=mode == "full", mode=mode)
    offer = r.offer if on_device else partial(r.session.offer, key=KEY, moment=Moment())
    r.session.books.take_offers(False)
    offer(torch.zeros(30, 10))
    r.session.books.take_offers(True)
    r.stager.failed = True
    r.offer(torch.zeros(50))
    rows = {DropReason.STOPPED: 1200, DropReason.INTERNAL: 200}
    for reason, nbytes in rows.items():
        row = r.session.books.ledger.row(0, reason)
        assert row is not None
        assert (row.count, row.nbytes) == (1, nbytes)
