"""Rows of frameworks that capd's development does not need: DeepSpeed and torchtitan."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from tests.integration.three_ways.three_ways_rows import MICRO_BATCHES, Losses, Row, moments
from tests.kit.models.sharded_models import Transformer, batch, loss_of

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script


def deepspeed(script: Script, stage: int) -> Losses:
    """The engine accumulates, and steps when it is time. With stage 3 no weight stays after a forward."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = Transformer()
    script.watch(model)
    if stage == 3:  # it has a function of its own in the place of F.linear
        script.bounded(torch.nn.Linear)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    losses = []
    for step, micro_batch, _ in moments(script):
        words, targets = batch(step, micro_batch, dist.get_rank())
        loss = loss_of(engine(words), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def torchtitan(script: Script, way: str) -> Losses:
    """Its own Trainer, whose steps the script wraps to know where it is."""
    from tests.integration.frameworks import torchtitan_job as job

    job.use_cpus()
    with tempfile.TemporaryDirectory(prefix="capd-ways-") as directory:
        config = job.config_of(way, job.WAYS[int(way[-1]) if way[-1].isdigit() else 1][way], Path(directory))
        trainer = config.build()
        [model] = trainer.model_parts
        script.watch(model, wrapper="_checkpoint_wrapped_module")
        losses: Losses = []
        counts: Counter[int] = Counter()
        original = trainer.forward_backward_step

        def told(*args: Any, **kwargs: Any) -> Any:
            script.at(trainer.step - 1, counts[trainer.step])
            counts[trainer.step] += 1
            result = original(*args, **kwargs)
            script.off()
            losses.append(torch.as_tensor(result).detach())
            return result

        trainer.forward_backward_step = told
        trainer.train()
        trainer.close()
    return losses


ROWS: dict[str, Row] = {
    **{
        f"deepspeed_zero{stage}": Row(
            partial(deepspeed, stage=stage), ranks=2, imports=("deepspeed",), package="deepspeed"
        )
        for stage in (0, 1, 2, 3)
    },
    "torchtitan": Row(
        partial(torchtitan, way="single"), imports=("torchtitan",), package="torchtitan", launched=True
    ),
    "torchtitan_tp": Row(
        partial(torchtitan, way="tp2"), ranks=2, imports=("torchtitan",), package="torchtitan"
    ),
}
