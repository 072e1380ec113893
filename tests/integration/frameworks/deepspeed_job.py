"""A rank that trains a tiny transformer with DeepSpeed in several ways, unwatched, then watched under the way's name.

    python deepspeed_job.py FILE

Losses and parameters must be the same bits in both; FILE.<rank> tells what they were. What is captured follows from the
names of the ways, their order, and the sizes in sharded_models.py.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

import capd_client
from capd_client.protocol.kinds import ATTENTION, LINEAR
from tests.kit.models.sharded_models import MICRO_BATCHES, STEPS, Block, Transformer, batch, loss_of

Watch = Callable[[nn.Module], None]


class Way(Protocol):
    def __call__(self, watch: Watch) -> Any:
        """The engine to train with, its model given to `watch` on the way."""


def zero3_before(watch: Watch) -> Any:
    model = Transformer()
    watch(model)
    return engine_of(model, 3)


def zero3_after(watch: Watch) -> Any:
    engine = engine_of(Transformer(), 3)
    watch(engine)
    return engine


def zero3_rehooked(watch: Watch) -> Any:
    """DeepSpeed's hooks are taken off and put back in front of every step, as TRL does to generate.

    Watched on the first rank alone: a gather that capd itself set off there would find nobody to talk to.
    """
    engine = engine_of(Transformer(), 3)
    if dist.get_rank() == 0:
        watch(engine)
    return engine


def zero3_init(watch: Watch) -> Any:
    """Parameters are parts from the beginning; blocks are checkpointed, so that they are gathered once more."""
    with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
        model = Transformer()
    wrap = functools.partial(
        wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT
    )
    wrapping.apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Block))
    watch(model)
    return engine_of(model, 3)


def zero2(watch: Watch) -> Any:
    model = Transformer()
    watch(model)
    return engine_of(model, 2)


WAYS: tuple[Way, ...] = (zero3_before, zero3_after, zero3_rehooked, zero3_init, zero2)


def config_of(stage: int) -> dict[str, Any]:
    """With stage 3 every parameter is gathered for each forward, none stays."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def engine_of(model: nn.Module, stage: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage))
    return engine


def _rehook(offload: Any) -> None:
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    offload._register_deepspeed_module(offload.module)


def train(engine: Any, rank: int, *, rehooked: bool) -> list[str]:
    """A few steps; returns losses and a digest of the rank's part of the parameters."""
    results = []
    for step in range(STEPS):
        if rehooked:
            _rehook(engine.optimizer.parameter_offload)
        for micro_batch in range(MICRO_BATCHES):
            words, targets = batch(step, micro_batch, rank)
            loss = loss_of(engine(words), targets)
            engine.backward(loss)
            engine.step()
            results.append(loss.item().hex())
    local = (getattr(p, "ds_tensor", p).detach() for p in engine.module.parameters())
    return [*results, *(float(p.double().sum()).hex() for p in local)]


def main(path: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    told = {}
    for way in WAYS:
        name, found = way.__name__, []
        for watched in (False, True):
            torch.manual_seed(0)
            handles: list[Any] = []

            def watch(
                model: nn.Module, name: str = name, watched: bool = watched, handles: Any = handles
            ) -> None:
                if watched:
                    tensors = {*LINEAR.tensors, *ATTENTION.tensors}
                    handles.append(capd_client.watch(model, name=name, steps="all", tensors=tensors))

            engine = way(watch)
            found.append(train(engine, rank, rehooked=way is zero3_rehooked))
            for handle in handles:
                handle.remove()
            engine.destroy()
        assert found[0] == found[1], f"{name}: watching changed the results"
        told[name] = found[1]
    path.with_suffix(f".{rank}").write_text(json.dumps(told))
    capd_client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
