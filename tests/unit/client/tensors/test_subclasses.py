"""Tensor subclasses with tensors inside, as quantised weights are: each is captured as it is, with what reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capd_client.protocol.key import Key, Moment
from capd_client.session.session import Session
from tests.kit.client.peer import Peer


@pytest.fixture
def session(peer: Peer, make_session: Callable[..., Session]) -> Session:
    return make_session(strict=True, arena_bytes=1 << 20)


class Scaled(torch.Tensor):
    """Whole numbers and a scale per row. Its payload may be such a tensor itself."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: torch.Tensor, bits: int) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=torch.float32)
        made.payload, made.scale, made.bits = payload, scale, bits
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[Any, Any]]:
        return ["payload", "scale"], {"bits": self.bits, "dtype": torch.float32}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["payload"], inner["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented  # nothing is computed with it, least of all by capd


class Odd(Scaled):
    """With a context that is no JSON."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[Any, Any]]:
        return ["payload", "scale"], {(1, 2): torch.int8}


def scaled(kind: type[Scaled] = Scaled) -> Scaled:
    return kind(torch.arange(6, dtype=torch.int8).view(2, 3), torch.tensor([[0.5], [2.0]]), 8)


def offer(session: Session, tensor: torch.Tensor, quant_type: str = "fp32") -> None:
    key = Key(quant_type=quant_type, rank=0, tensor_name="weight")
    session.offer(tensor, key, Moment(), attributes={"layout": "x"}, cast_to=torch.bfloat16)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_each_tensor_inside_is_a_capture_of_its_own(session: Session, peer: Peer) -> None:
    held = scaled()
    offer(session, held)
    assert session.flush(10)

    assert peer.data_of("weight.payload") == [bits(held.payload)]
    assert peer.data_of("weight.scale") == [bits(held.scale)]
    assert peer.data_of("weight") == []
    labels = {record.key.tensor_name: (record.key.quant_type, record.dtype) for record in peer.records}
    assert labels == {"weight.payload": ("int8", "int8"), "weight.scale": ("fp32", "float32")}
    for record in peer.records:
        about = dict(record.attributes)
        assert json.loads(about.pop("tensor_context")) == {"bits": 8, "dtype": "torch.float32"}
        assert about == {
            "emulation": "none",
            "layout": "x",
            "tensor_class": f"{__name__}.Scaled",
            "tensor_shape": [2, 3],
            "tensor_dtype": "float32",
            "tensor_parts": {"payload": [[2, 3], [3, 1]], "scale": [[2, 1], [1, 1]]},
        }
    assert session.snapshot().offered == 2


def test_a_label_of_the_users_stays_and_classes_nest(session: Session, peer: Peer) -> None:
    outer = Scaled(scaled(), torch.ones(1), 4)  # type: ignore[arg-type]
    offer(session, outer, quant_type="mine")
    assert session.flush(10)

    names = ("weight.payload.payload", "weight.payload.scale", "weight.scale")
    assert {record.key.tensor_name for record in peer.records} == set(names)
    assert {record.key.quant_type for record in peer.records} == {"mine"}


def test_a_context_that_is_no_json_is_told_as_text(session: Session, peer: Peer) -> None:
    offer(session, scaled(Odd))
    assert session.flush(10)

    assert {record.attributes["tensor_context"] for record in peer.records} == {"{(1, 2): torch.int8}"}


def test_a_ragged_tensor_is_its_values_and_where_its_rows_begin(session: Session, peer: Peer) -> None:
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    offer(session, torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert session.flush(10)

    assert peer.data_of("weight.values") == [bits(torch.cat(parts))]
    assert peer.data_of("weight.offsets") == [bits(torch.tensor([0, 2, 6]))]


def test_weights_that_torchao_quantised(session: Session, peer: Peer) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(32, 4, bias=False)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    offer(session, linear.weight)
    assert session.flush(10)

    names = [record.key.tensor_name for record in peer.records]
    assert {"weight.qdata", "weight.scale"} <= set(names)
    [payload], [scale] = peer.data_of("weight.qdata"), peer.data_of("weight.scale")
    read = torch.frombuffer(bytearray(payload), dtype=torch.int8).view(4, 32)
    scales = torch.frombuffer(bytearray(scale), dtype=torch.float32).view(4, 1)
    assert torch.equal(read * scales, linear.weight.dequantize())
