"""Weights that are other tensors in every forward: several forwards before their backwards, under FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from capd_client.watching.watch import watch
from tests.kit.client.compiled_models import COMPILING
from tests.kit.client.models import Blocks, Checkpoint, non_reentrant, reentrant
from tests.kit.client.sink import MemorySink

pytestmark = [
    *COMPILING,
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),  # there is one rank
    pytest.mark.filterwarnings("ignore:.*FSDP.*deprecated:FutureWarning"),
]
FORWARDS = 3


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_with_original_parameters(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def compiled_fsdp1(model: nn.Module) -> nn.Module:
    return torch.compile(fsdp1_with_original_parameters(model), backend="aot_eager")


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def together(losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


def one_by_one(losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()


CASES = [
    *product((fsdp1, fsdp1_with_original_parameters, fsdp2), (None, reentrant, non_reentrant)),
    (compiled_fsdp1, None),
    *(pytest.param(compiled_fsdp1, some, marks=pytest.mark.fault) for some in (reentrant, non_reentrant)),
]


@pytest.mark.parametrize("backward", [together, one_by_one])
@pytest.mark.parametrize(("shard", "checkpoint"), CASES)
def test_no_gradient_of_a_weight_is_lost_or_doubled_when_forwards_run_before_backwards(
    sink: MemorySink,
    shard: Callable[[nn.Module], nn.Module],
    checkpoint: Checkpoint,
    backward: Callable[[list[Tensor]], None],
) -> None:
    model = shard(Blocks(checkpoint))
    watch(model, tensors=["input", "grad_output", "grad_weight"])

    backward([model(torch.randn(4, 6, requires_grad=True)).square().sum() for _ in range(FORWARDS)])

    modules = {c.key.module for c in sink.captured}
    views = shard is not fsdp2  # whose weight is one leaf, which gets the sum of its backward
    for module in modules:
        # Each recompute has a backward of its own.
        recomputed = checkpoint is reentrant and module != "inlet"
        products = [
            sink.one(module, "grad_output", (0, n, 0)).T @ sink.one(module, "input", (0, n, 0))
            for n in range(FORWARDS)
        ]
        expected = products if views or recomputed or backward is one_by_one else [sum(products)]
        gradients = [sink.one(module, "grad_weight", (0, n, 0)) for n in range(len(expected))]
        torch.testing.assert_close(gradients, expected)
        assert len(sink.of(module, "grad_weight")) == len(expected)
    assert len(modules) == 5


def test_the_place_is_said_in_the_mesh_of_the_parameters_not_only_in_the_one_it_was_cut_out_of(
    sink: MemorySink,
) -> None:
    """As torchtitan makes its meshes."""
    world = init_device_mesh("cpu", (1,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (1, 1), ("fsdp", "tp"))["fsdp"]
    model = fully_shard(nn.Sequential(nn.Linear(4, 3)), mesh=mesh)
    watch(model)

    model(torch.randn(2, 4)).sum().backward()

    [captured] = sink.of("0", "input")
    assert captured.attributes is not None
    assert captured.attributes.items() >= {"fsdp_rank": 0, "fsdp_size": 1}.items()
