"""Tensors declared immutable: copied from where they are, held until then, and dropped if they changed after all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from capd_client.arena.allocator import SMALL_NBYTES
from capd_client.device import pieces, transfers
from capd_client.session.session import Session
from tests.kit.client.device import KEY, FakeDevice, Rig
from tests.kit.client.peer import Peer

MIB = 1 << 20
MakeRig = Callable[..., Rig]


def large(nbytes: int = SMALL_NBYTES) -> torch.Tensor:
    return torch.randn(nbytes // 4)


def test_it_is_copied_from_where_it_is_and_takes_no_room_in_the_ring(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, arena_bytes=8 * MIB)
    tensor = large(MIB)  # 256 times the ring
    r.offer(tensor, immutable=True)
    r.stager.advance()

    source, _, after = r.device.fetches[0]
    assert source.data_ptr() == tensor.data_ptr()
    assert list(after) == r.device.issued
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("x") == [tensor.numpy().tobytes()]


@pytest.mark.parametrize("parameter", [False, True])
def test_it_is_held_until_its_copy_is_done(peer: Peer, rig: MakeRig, parameter: bool) -> None:
    r = rig(by_hand=True, arena_bytes=8 * MIB)
    tensor = torch.nn.Parameter(large()) if parameter else large()
    expected = tensor.detach().numpy().tobytes()
    storage = StorageWeakRef(tensor.untyped_storage())
    r.offer(tensor, immutable=True)
    del tensor
    r.stager.advance()
    r.device.fetches[:] = [(source.clone(), *rest) for source, *rest in r.device.fetches]
    assert not storage.expired()
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("x") == [expected]
    assert storage.expired()


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("change", ["written", "freed", "freed and made anew"])
def test_one_that_changed_after_all_is_dropped_and_said_so(
    peer: Peer, rig: MakeRig, when: str, change: str
) -> None:
    r = rig(by_hand=True, arena_bytes=8 * MIB)
    free = r.session.queue.slots.free_nbytes
    tensor = large()
    nbytes = tensor.nbytes
    r.offer(tensor, immutable=True)
    if when == "while":
        r.stager.advance()
    if change == "written":
        tensor.add_(1)
    else:
        tensor.untyped_storage().resize_(0)
        if change == "freed and made anew":
            keep = torch.empty(nbytes, dtype=torch.uint8)  # so that it gets another place
            tensor.untyped_storage().resize_(nbytes)
            del keep
    if when == "while" and change != "written":
        for _, event in r.device.marks:
            event.happened = True  # what such a copy reads is anything
    r.finish()

    assert r.session.flush(10)
    now = r.session.snapshot()
    assert (now.offered, now.committed, now.in_flight, now.dropped) == (1, 0, 0, {"mutated": 1})
    assert r.session.queue.slots.free_nbytes == free
    assert len(r.device.recycled) == len(r.device.issued) + len(r.device.marks)


def test_one_that_changes_between_its_pieces_gives_its_slot_back_behind_them(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1 << 14)
    monkeypatch.setattr(transfers, "AHEAD_NBYTES", 1 << 14)
    r = rig(by_hand=True)
    free = r.session.queue.slots.free_nbytes
    tensor = large()
    r.offer(tensor, immutable=True)
    r.stager.advance()
    tensor.zero_()
    r.stager.advance()
    assert r.session.snapshot().in_flight == 1  # a copy may still write to the slot
    r.device.run(0)
    r.stager.advance()
    r.device.run_all()
    r.stager.advance()

    assert r.device.sizes == [1 << 14, 0]
    assert r.session.snapshot().dropped == {"mutated": 1}
    assert r.session.queue.slots.free_nbytes == free
    assert not r.stager.pending


def test_what_cannot_be_copied_as_it_lies_goes_by_the_ring(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, arena_bytes=8 * MIB)
    matrix = torch.randn(256, 256)
    with torch.inference_mode():
        inference = torch.randn(256, 256)
    tensors = [matrix[:, :128], torch.view_as_complex(matrix.view(-1, 2)).conj().imag, inference]
    for tensor in tensors:
        r.offer(tensor, immutable=True)
    r.offer(matrix, torch.bfloat16, immutable=True)
    r.offer(torch.ones(8), immutable=True)  # too small for a copy of its own
    kept = [tensor.clone() for tensor in tensors]
    matrix.zero_()  # no harm: a snapshot was taken
    r.finish()

    assert r.session.flush(10)
    assert peer.data_of("x")[:3] == [tensor.resolve_neg().contiguous().numpy().tobytes() for tensor in kept]
    assert r.session.snapshot().committed == 5


def test_a_permuted_one_is_held_as_it_is_in_memory(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, arena_bytes=8 * MIB)
    matrix = torch.randn(512, 256)
    r.offer(matrix.t(), immutable=True)
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("x") == [matrix.t().contiguous().numpy().tobytes()]
    [record] = peer.records
    assert (record.descriptor.shape, record.descriptor.order) == ((256, 512), (1, 0))


def test_captured_in_inference_mode_a_change_is_still_noticed(peer: Peer, rig: MakeRig) -> None:
    r = rig(by_hand=True, arena_bytes=8 * MIB)
    tensor = large()
    with torch.inference_mode():
        r.offer(tensor, immutable=True)
    tensor.add_(1)
    r.finish()
    assert r.session.snapshot().dropped == {"mutated": 1}


def test_scalars_and_one_byte_dtypes_and_tensors_in_a_larger_storage(peer: Peer, rig: MakeRig) -> None:
    r = rig(by_hand=True, arena_bytes=8 * MIB)
    whole = torch.randint(0, 256, (2 * SMALL_NBYTES,), dtype=torch.uint8)
    tensors = [torch.tensor(3.0), whole[SMALL_NBYTES:], whole[:SMALL_NBYTES].view(torch.float8_e4m3fn)]
    for tensor in tensors:
        r.offer(tensor, immutable=True)
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("x") == [
        tensors[0].numpy().tobytes(),
        whole[SMALL_NBYTES:].numpy().tobytes(),
        whole[:SMALL_NBYTES].numpy().tobytes(),
    ]


def test_larger_than_the_ring_without_the_declaration_is_too_large(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, arena_bytes=8 * MIB)
    r.offer(large())
    r.offer(torch.randn(512, 512)[:, :500], immutable=True)
    assert r.session.snapshot().dropped == {"too_large": 2}


def test_on_the_host_the_declaration_changes_nothing(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True)
    for tensor in (torch.ones(4), large(), torch.ones(64, 64).t()):
        session.offer(tensor, KEY, session.context.moment(), immutable=True)
        tensor.zero_()
    assert session.flush(10)
    assert all(any(data) for data in peer.data_of("x"))
    assert session.snapshot().committed == 3
