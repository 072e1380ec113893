"""One of two ranks: a step of an emulated model, distributed in one way, against the same step in one process."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from capd_client import emulate
from tests.kit.emulated.models import Model, twin
from tests.kit.jobs.groups import leave_group


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]  # type: ignore[misc, union-attr]


def replicated(how: str, order: str, rank: int) -> None:
    """DDP and FSDP2: each rank has the whole product of its own input."""
    torch.manual_seed(0)
    alone, x = Model(), torch.randn(2, 1, 7, 32)
    model: nn.Module = twin(alone)
    recipe = {"linear": "mxfp8", "qk": "mxfp4", "pv": "mxfp4"}
    if order == "before":
        emulate(model, recipe)
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    if order == "after":
        assert emulate(model, recipe).modules[:2] == ("layers.0", "layers.0.qkv")

    found = gradients(model, x[rank])

    with emulate(alone, recipe):
        parts = []
        for part in x:
            alone.zero_grad()
            parts.append([g.clone() for g in gradients(alone, part)])
    for got, *each in zip(found, *parts, strict=True):
        torch.testing.assert_close(got, sum(each) / len(each))


def tensor_parallel(order: str, rank: int) -> None:
    """Each rank has half of every weight and of the sequence. The halves are whole blocks, so all rounds the same."""
    torch.manual_seed(0)
    alone, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(2, 32, 64)
    model, parts = copy.deepcopy(alone), [part.requires_grad_() for part in x.clone().chunk(2, dim=1)]
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    if order == "before":
        emulate(model, {"linear": "mxfp8"})
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    if order == "after":
        assert emulate(model, {"linear": "mxfp8"}).modules == ("0", "2")
    out = model(parts[rank])
    out.square().sum().backward()

    with emulate(alone, {"linear": "mxfp8"}):
        expected = alone(x.requires_grad_())
        expected.square().sum().backward()
    torch.testing.assert_close(out, expected.chunk(2, dim=1)[rank])
    torch.testing.assert_close(parts[rank].grad, x.grad.chunk(2, dim=1)[rank])  # type: ignore[union-attr]
    for got, one in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(got.grad, DTensor)
        torch.testing.assert_close(got.grad.full_tensor(), one.grad)


def main(how: str, order: str) -> None:
    dist.init_process_group("gloo")
    if how == "tp":
        tensor_parallel(order, dist.get_rank())
    else:
        replicated(how, order, dist.get_rank())
    leave_group()


main(*sys.argv[1:])
