"""A rank that trains a tiny transformer in every way to shard one, first unwatched, then watched under the way's name.

    python sharded_job.py FILE [WAY ...]

The ways named, or all that two ranks can go. Losses and parameters must be the same bits in both; FILE.<rank> tells
what they were. What is captured follows from the names of the ways, their order, and the sizes in sharded_models.py.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import capd_client
from capd_client.protocol.kinds import ATTENTION, LINEAR
from tests.kit.jobs.groups import leave_group
from tests.kit.models.sharded_models import (
    MICRO_BATCHES,
    STEPS,
    Block,
    Transformer,
    batch,
    checkpointed,
    loss_of,
    tensor_parallel,
)

Watch = Callable[[nn.Module], None]


class Way(Protocol):
    def __call__(self, watch: Watch) -> nn.Module:
        """The model to train, given to `watch` on the way."""


def ddp(watch: Watch) -> nn.Module:
    """Watched before it is wrapped; blocks are checkpointed, the kind that runs hooks of the first graph."""
    model = Transformer()
    watch(model)
    return DistributedDataParallel(checkpointed(model, CheckpointImpl.NO_REENTRANT))


def ddp_compiled(watch: Watch) -> nn.Module:
    model = DistributedDataParallel(Transformer())
    watch(model)
    compiled: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    return compiled


def fsdp1(watch: Watch) -> nn.Module:
    """Watched after it was wrapped; blocks are checkpointed, the kind that drops its first graph."""
    model = checkpointed(Transformer(), CheckpointImpl.REENTRANT)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )
    watch(wrapped)
    return wrapped


def fsdp2(watch: Watch) -> nn.Module:
    model = _fully_sharded(checkpointed(Transformer(), CheckpointImpl.NO_REENTRANT))
    watch(model)
    return model


def fsdp2_bf16(watch: Watch) -> nn.Module:
    model = Transformer()
    watch(model)
    return _fully_sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp2_compiled(watch: Watch) -> nn.Module:
    """Blocks compiled one by one, as torchtitan does."""
    model = Transformer()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    model = _fully_sharded(model)
    watch(model)
    return model


def tp(watch: Watch) -> nn.Module:
    model = Transformer()
    tensor_parallel(model, _mesh("tp"), sequence=False)
    watch(model)
    return model


def tp_sequence(watch: Watch) -> nn.Module:
    """Watched before it is parallelised."""
    model = Transformer()
    watch(model)
    tensor_parallel(model, _mesh("tp"), sequence=True)
    return checkpointed(model, CheckpointImpl.NO_REENTRANT)


def tp_compiled(watch: Watch) -> nn.Module:
    model = Transformer()
    tensor_parallel(model, _mesh("tp"), sequence=True)
    watch(model)
    compiled: nn.Module = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    return compiled


def fsdp2_tp(watch: Watch) -> nn.Module:
    """Two dimensions: data parallel first, tensor parallel inside."""
    model, mesh = Transformer(), _mesh_of_two()
    tensor_parallel(model, mesh["tp"], sequence=True)
    model = _fully_sharded(model, mesh=mesh["dp"])
    watch(model)
    return model


def fsdp2_tp_reentrant(watch: Watch) -> nn.Module:
    """Watched before it is sharded."""
    model, mesh = Transformer(), _mesh_of_two()
    watch(model)
    tensor_parallel(model, mesh["tp"], sequence=True)
    return _fully_sharded(checkpointed(model, CheckpointImpl.REENTRANT), mesh=mesh["dp"])


def fsdp2_tp_non_reentrant(watch: Watch) -> nn.Module:
    model, mesh = Transformer(), _mesh_of_two()
    tensor_parallel(model, mesh["tp"], sequence=True)
    model = _fully_sharded(checkpointed(model, CheckpointImpl.NO_REENTRANT), mesh=mesh["dp"])
    watch(model)
    return model


def tp_reentrant(watch: Watch) -> nn.Module:
    """Groups of tensor parallel ranks that know nothing of each other."""
    model = Transformer()
    tensor_parallel(model, _mesh_of_two()["tp"], sequence=True)
    watch(model)
    return checkpointed(model, CheckpointImpl.REENTRANT)


def tp_non_reentrant(watch: Watch) -> nn.Module:
    """Not by sequence: what is checkpointed gets plain tensors."""
    model = Transformer()
    tensor_parallel(model, _mesh_of_two()["tp"], sequence=False)
    watch(model)
    return checkpointed(model, CheckpointImpl.NO_REENTRANT)


ON_TWO: tuple[Way, ...] = (
    ddp, ddp_compiled, fsdp1, fsdp2, fsdp2_bf16, fsdp2_compiled, tp, tp_sequence, tp_compiled, fsdp2_tp,
)  # fmt: skip
ON_FOUR: tuple[Way, ...] = (fsdp2_tp_reentrant, fsdp2_tp_non_reentrant, tp_reentrant, tp_non_reentrant)
WAYS = {way.__name__: way for way in (*ON_TWO, *ON_FOUR)}


@functools.cache
def _mesh(name: str) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def _mesh_of_two() -> Any:
    """Data parallel, and inside of that two tensor parallel ranks."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def _fully_sharded(model: Transformer, **options: Any) -> Transformer:
    options.setdefault("mesh", _mesh("dp"))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, parameters: list[nn.Parameter], rank: int, name: str = "") -> list[str]:
    """A few steps; returns losses and a digest of the parameters. `name`: capture the gradient that is reduced, too."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    results = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            words, targets = batch(step, micro_batch, rank)
            with _accumulating(model, last=micro_batch == MICRO_BATCHES - 1):
                loss = loss_of(model(words), targets)
                loss.backward()
            results.append(loss.item().hex())
        if name:
            _capture_reduced(model, name)
        optimizer.step()
        optimizer.zero_grad()
    local = (getattr(p, "_local_tensor", p).detach() for p in parameters)
    return [*results, *(float(p.double().sum()).hex() for p in local)]


def _accumulating(model: nn.Module, *, last: bool) -> Any:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif not last and hasattr(model, "no_sync"):
        return model.no_sync()
    return nullcontext()


def _capture_reduced(model: nn.Module, name: str) -> None:
    for qualified, parameter in model.named_parameters():
        if ".0." in qualified and qualified.endswith("up.weight") and parameter.grad is not None:
            capd_client.capture(parameter.grad, tensor_name="reduced", module=f"{name}.reduced")


def main(path: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch._dynamo.config.optimize_ddp = False
    told = {name: losses_of(name, rank) for name in names}
    path.with_suffix(f".{rank}").write_text(json.dumps(told))
    capd_client.close()
    leave_group()


def losses_of(name: str, rank: int) -> Any:
    """The losses of one way, which are the same with and without a watch."""
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        handles: list[Any] = []

        def watch(model: nn.Module, watched: bool = watched, handles: Any = handles) -> None:
            if watched:
                tensors = {*LINEAR.tensors, *ATTENTION.tensors}
                handles.append(capd_client.watch(model, name=name, steps="all", tensors=tensors))

        model = WAYS[name](watch)
        tensor_ranks = 2 if "tp" in name else 1
        found.append(train(model, list(model.parameters()), rank // tensor_ranks, name if watched else ""))
        for handle in handles:
            handle.remove()
    assert found[0] == found[1], f"{name}: watching changed the results"
    return found[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:] or [way.__name__ for way in ON_TWO])
