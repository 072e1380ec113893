"""Rows of two ranks that share the work on a model: data, tensor and pipeline parallel."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from tests.integration.three_ways.three_ways_rows import MICRO_BATCHES, Losses, Row, moments
from tests.kit.models.sharded_models import Block, Transformer, batch, checkpointed, loss_of, tensor_parallel

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script


def train(script: Script, model: Any, rank: int) -> Losses:
    """Gradient accumulation without communication until the last micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, micro_batch, _ in moments(script):
        last = micro_batch == MICRO_BATCHES - 1
        tokens, targets = batch(step, micro_batch, rank)
        with _accumulating(model, last=last):
            loss = loss_of(model(tokens), targets)
            loss.backward()
        losses.append(loss.detach())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _accumulating(model: Any, *, last: bool) -> Any:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif not last and hasattr(model, "no_sync"):
        return model.no_sync()
    return contextlib.nullcontext()


def begin(name: str = "dp") -> Any:
    """What torchrun's ranks do first; returns the mesh of all of them."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    torch._dynamo.config.optimize_ddp = False
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def ddp(script: Script) -> Losses:
    begin()
    model = Transformer()
    wrapped = nn.parallel.DistributedDataParallel(model)
    script.watch(model, wrapped=wrapped)
    return train(script, wrapped, dist.get_rank())


def ddp_compiled(script: Script) -> Losses:
    begin()
    model = Transformer()
    wrapped = nn.parallel.DistributedDataParallel(model)
    script.watch(model, wrapped=wrapped)
    return train(script, torch.compile(wrapped, backend="aot_eager"), dist.get_rank())


def fsdp1(script: Script) -> Losses:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    begin()
    model = Transformer()
    script.watch(model)
    wrapped = FullyShardedDataParallel(
        checkpointed(model, CheckpointImpl.NO_REENTRANT), auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"), use_orig_params=True,
    )  # fmt: skip
    return train(script, wrapped, dist.get_rank())


def _fully_sharded(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(script: Script) -> Losses:
    mesh, model = begin(), Transformer()
    script.watch(model)
    return train(script, _fully_sharded(model, mesh=mesh), dist.get_rank())


def fsdp2_bf16(script: Script) -> Losses:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh, model = begin(), Transformer()
    script.watch(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return train(script, _fully_sharded(model, mesh=mesh, mp_policy=policy), dist.get_rank())


def fsdp2_checkpointed(script: Script) -> Losses:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

    mesh, model = begin(), Transformer()
    script.watch(model)
    wrapped = _fully_sharded(checkpointed(model, CheckpointImpl.REENTRANT), mesh=mesh)
    return train(script, wrapped, dist.get_rank())


def fsdp2_compiled(script: Script) -> Losses:
    """Blocks compiled one by one, as torchtitan does."""
    mesh, model = begin(), Transformer()
    script.watch(model)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return train(script, _fully_sharded(model, mesh=mesh), dist.get_rank())


def tp(script: Script) -> Losses:
    mesh, model = begin("tp"), Transformer()
    tensor_parallel(model, mesh, sequence=False)
    script.watch(model)
    return train(script, model, 0)


def tp_sequence(script: Script) -> Losses:
    mesh, model = begin("tp"), Transformer()
    script.watch(model)
    tensor_parallel(model, mesh, sequence=True)
    return train(script, model, 0)


_FSDP = ("torch.distributed.fsdp", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
_TENSOR = ("torch.distributed.tensor.parallel",)

ROWS: dict[str, Row] = {
    "ddp": Row(ddp, ranks=2),
    "ddp_compiled": Row(ddp_compiled, ranks=2),
    "fsdp1": Row(fsdp1, ranks=2, imports=_FSDP),
    "fsdp2": Row(fsdp2, ranks=2, imports=_FSDP),
    "fsdp2_bf16": Row(fsdp2_bf16, ranks=2, imports=_FSDP),
    "fsdp2_checkpointed": Row(fsdp2_checkpointed, ranks=2, imports=_FSDP),
    "fsdp2_compiled": Row(fsdp2_compiled, ranks=2, imports=_FSDP),
    "tp": Row(tp, ranks=2, imports=_TENSOR),
    "tp_sequence": Row(tp_sequence, ranks=2, imports=_TENSOR),
}
