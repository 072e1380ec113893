"""`scalar()` inside compiled functions: recorded at every call, and the graph stays whole."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import capd_client
from capd_client.protocol.counter_page import DropReason
from tests.kit.client.compiled_models import COMPILING
from tests.kit.client.peer import Peer
from tests.kit.tiers import rows

pytestmark = COMPILING


def values(peer: Peer, name: str) -> list[float]:
    return [struct.unpack("<d", data)[0] for data in peer.data_of(name)]


@pytest.mark.parametrize("backend", rows(["eager", "aot_eager"], ["aot_eager"]))
def test_every_call_is_recorded_and_the_graph_stays_whole(on: Peer, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        loss = (x * 2).sum()
        capd_client.scalar("loss", loss)
        capd_client.scalar("rate", 0.25, iteration=3)
        return loss

    for value in (1.0, 2.0, 3.0):
        loss_of(torch.full((2,), value, requires_grad=True)).backward()

    assert capd_client.flush(10)
    assert values(on, "loss") == [4.0, 8.0, 12.0]
    assert values(on, "rate") == [0.25] * 3
    assert counter.frame_count == 1
    assert {one.descriptor.moment.iteration for one in on.records if one.key.tensor_name == "rate"} == {3}


@pytest.mark.parametrize(
    ("name", "value"),
    rows(
        [("aux", None), ("aux", "text"), ("aux", 10**400), ("aux", Decimal(2)), (7, 1.0)],
        [("aux", None), ("aux", Decimal(2))],
    ),
    ids=str,
)
def test_what_is_no_number_leaves_the_graph_whole(on: Peer, name: Any, value: Any) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        capd_client.scalar(name, value)
        return x * 2

    assert loss_of(torch.ones(2)).tolist() == [2.0, 2.0]
    assert capd_client.flush(10)
    assert capd_client.counters()["dropped"] == {DropReason.UNSUPPORTED.value: 1}


@pytest.mark.slow
@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), True, 3], ids=repr)
def test_numbers_of_numpy_are_recorded(on: Peer, number: Any) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        capd_client.scalar("x", number)
        return x * 2

    loss_of(torch.ones(2))
    assert capd_client.flush(10)
    assert values(on, "x") == [float(number)]


def test_a_call_with_an_unknown_argument_raises_as_without_the_compiler(on: Peer) -> None:
    @torch.compile(backend="eager")
    def loss_of(x: Tensor) -> Tensor:
        capd_client.scalar("loss", x.sum(), step=3)  # type: ignore[call-arg]
        return x

    with pytest.raises(TypeError, match="step"):
        loss_of(torch.ones(2))


def test_with_capture_off_the_call_leaves_the_graph(fresh: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        capd_client.scalar("loss", x)
        return x * 2

    loss_of(torch.ones(()))
    assert (counter.frame_count, counter.op_count) == (1, 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_distributed_value_is_recorded_if_every_rank_has_it(on: Peer, compiled: bool) -> None:
    from torch import distributed
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    def note(name: str, value: Tensor) -> Tensor:
        capd_client.scalar(name, value)
        return value * 2

    call = torch.compile(note, backend="aot_eager") if compiled else note
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, placement in (("whole", Replicate()), ("part", Partial())):
            call(name, DTensor.from_local(torch.tensor(3.0), mesh, [placement]))
    finally:
        distributed.destroy_process_group()

    assert capd_client.flush(10)
    assert (values(on, "whole"), values(on, "part")) == ([3.0], [])
    assert capd_client.counters()["dropped"] == {DropReason.UNSUPPORTED.value: 1}
