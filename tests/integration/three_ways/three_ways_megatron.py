"""Rows of megatron-core: its own schedules train tiny GPTs on two ranks of CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from tests.integration.frameworks import megatron_job as job
from tests.integration.three_ways.three_ways_rows import Losses, Row

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script


def megatron(script: Script, mode: job.Mode) -> Losses:
    """Steps of the schedule, each with an evaluation after it, once in training mode."""
    from tests.kit.models import megatron_cpu

    megatron_cpu.install()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=mode.pp,
        virtual_pipeline_model_parallel_size=mode.vpp if mode.vpp > 1 else None,
    )
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    chunks = job.build(mode)
    script.bounded(ColumnParallelLinear, RowParallelLinear, DotProductAttention)
    place = parallel_state.get_pipeline_model_parallel_rank()
    script.watch(
        *(chunk.module for chunk in chunks),
        wrapped=chunks,
        layers=[mode.layers(place, number) for number in range(len(chunks))],
    )
    optimizer = job.make_optimizer(chunks)
    schedule = get_forward_backward_func()
    losses: Losses = []
    data_rank = parallel_state.get_data_parallel_rank()
    for step in range(job.STEPS):
        for forward_only in (False, True):
            for chunk in chunks:
                chunk.train(not forward_only or step == 1)
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            reduced = schedule(
                forward_step_func=told(script, step, training=not forward_only),
                data_iterator=[job.batches(data_rank, step) for _ in chunks],
                model=chunks,
                num_microbatches=job.MICRO_BATCHES,
                seq_length=job.SEQUENCE,
                micro_batch_size=job.MICRO_BATCH_SIZE,
                forward_only=forward_only,
            )
            losses += [loss["loss"] for loss in reduced]
            if not forward_only:
                optimizer.step()
    return [*losses, *(parameter.detach().sum() for chunk in chunks for parameter in chunk.parameters())]


def told(script: Script, step: int, *, training: bool) -> Callable[..., Any]:
    """The forward of a micro-batch, which the script itself counts, for each chunk."""
    counts: Counter[int] = Counter()

    def forward(data: Iterator[Tensor], model: Any) -> Any:
        if training:
            script.at(step, counts[id(model)])
            counts[id(model)] += 1
        result = job.forward_step(data, model)
        script.off()
        return result

    return forward


def row(mode: job.Mode) -> Row:
    return Row(partial(megatron, mode=mode), ranks=2, imports=("megatron.core",))


ROWS: dict[str, Row] = {
    "megatron": row(job.MODES["dp2"]),
    "megatron_pp": row(job.MODES["pp2"]),
    "megatron_vpp": row(job.Mode(pp=2, vpp=2)),
    "megatron_full": row(job.MODES["full"]),
    "megatron_selective": row(job.MODES["selective"]),
}
