"""Tensors that autograd keeps are held instead of copied: which, how many, and what becomes of one that changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from capd_client.device import transfers
from capd_client.device.holding import Holding
from capd_client.protocol.key import Key
from tests.kit.client.device import FakeDevice, Rig
from tests.kit.client.peer import Peer

MIB = 1 << 20
MakeRig = Callable[..., Rig]


def key(name: str = "input", layer: int = 0, **more: str) -> Key:
    return Key(quant_type="fp32", rank=0, tensor_name=name, module=f"layers.{layer}.mlp", layer=layer, **more)


def offer(r: Rig, tensor: torch.Tensor, of: Key) -> None:
    r.offer(tensor, key=of)


def held(r: Rig) -> int:
    return r.stager.holding._held_nbytes


def test_a_large_operand_in_a_training_forward_is_held_and_takes_no_room(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, arena_bytes=64 * MIB, max_held_nbytes=16 * MIB)
    tensor = torch.randn(2 * MIB)
    offer(r, tensor, key())
    assert held(r) == tensor.nbytes
    r.finish()
    assert held(r) == 0
    assert r.session.flush(10)
    assert peer.data_of("input") == [tensor.numpy().tobytes()]


@pytest.mark.parametrize(
    ("numel", "of", "gradients"),
    [
        (MIB // 2, key(), True),  # small: its copy costs next to nothing
        (2 * MIB, key("weight"), True),  # an optimizer changes it
        (2 * MIB, key("grad_output", operation="backward"), True),  # autograd adds to it
        (2 * MIB, key(), False),  # nobody keeps it
        (2 * MIB, Key(quant_type="fp32", rank=0, tensor_name="input"), True),  # a capture() of the job's
    ],
)
def test_others_are_copied(peer: Peer, rig: MakeRig, numel: int, of: Key, gradients: bool) -> None:
    r = rig(FakeDevice(nbytes=32 * MIB), by_hand=True, arena_bytes=64 * MIB, max_held_nbytes=16 * MIB)
    tensor = torch.randn(numel)
    expected = tensor.clone().numpy().tobytes()
    with torch.set_grad_enabled(gradients):
        offer(r, tensor, of)
    assert held(r) == 0
    tensor.zero_()
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of(of.tensor_name) == [expected]


def test_no_more_is_held_than_allowed_at_once(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=32 * MIB), by_hand=True, arena_bytes=64 * MIB, max_held_nbytes=20 * MIB)
    for _ in range(3):
        offer(r, torch.randn(2 * MIB), key())
    assert held(r) == 16 * MIB
    r.finish()
    offer(r, torch.randn(2 * MIB), key())
    assert held(r) == 8 * MIB
    r.finish()
    assert r.session.flush(10)
    assert r.session.snapshot().committed == 4


def test_a_module_whose_tensor_changed_is_copied_from_then_on_in_every_layer(
    peer: Peer, rig: MakeRig
) -> None:
    r = rig(FakeDevice(nbytes=32 * MIB), by_hand=True, arena_bytes=64 * MIB, max_held_nbytes=32 * MIB)
    changed = torch.randn(2 * MIB)
    offer(r, changed, key(layer=3))
    changed.add_(1)  # as an activation in place
    r.finish()
    assert r.session.snapshot().dropped == {"mutated": 1}
    assert held(r) == 0

    tensors = [torch.randn(2 * MIB) for _ in range(3)]
    expected = [tensor.clone().numpy().tobytes() for tensor in tensors]
    offer(r, tensors[0], key(layer=3))
    offer(r, tensors[1], key(layer=7))
    assert held(r) == 0
    offer(r, tensors[2], key("output", layer=7))  # that one is another's
    assert held(r) == 8 * MIB
    for tensor in tensors[:2]:
        tensor.add_(1)
    r.finish()
    assert r.session.flush(10)
    assert peer.data_of("input") == expected[:2]
    assert peer.data_of("output") == expected[2:]


def test_what_is_written_without_gradients_or_freed_is_noticed(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transfers, "ISSUE_NBYTES", 1 << 30
    )  # not before it is freed: that is no memory here any more
    r = rig(FakeDevice(nbytes=4096), by_hand=True, arena_bytes=64 * MIB, max_held_nbytes=32 * MIB)
    freed, replaced = torch.randn(2 * MIB), torch.randn(2 * MIB)
    offer(r, freed, key("query"))
    freed.untyped_storage().resize_(0)
    r.finish()
    offer(r, replaced, key("value"))
    with torch.no_grad():
        replaced.copy_(torch.zeros(2 * MIB))
    r.finish()
    assert r.session.snapshot().dropped == {"mutated": 2}


def test_after_a_device_error_nothing_counts_as_held(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=4096), by_hand=True, arena_bytes=64 * MIB, max_held_nbytes=16 * MIB)
    offer(r, torch.randn(2 * MIB), key())
    r.stager.fail()
    assert held(r) == 0


def test_off_is_off() -> None:
    assert not Holding(0).wants(key(), 8 * MIB)
