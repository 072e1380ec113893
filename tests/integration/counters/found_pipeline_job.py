"""A rank of a pipeline that knows nothing of capd: its stages are found by `capd run`.

    python found_pipeline_job.py FILE SCHEDULE STAGES

SCHEDULE: a class of torch's. STAGES: of each rank. No stage is told shapes, so that each runs trials to learn them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH, ROWS, CHUNKS, STEPS = 6, 3, 4, 2


class Part(nn.Module):
    """What one stage computes; its layers are numbered from 0, on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def batch(step: int) -> Tensor:
    """[CHUNKS * ROWS, WIDTH]; every micro-batch gets other rows."""
    return torch.randn(CHUNKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def main(kind: str, each: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    count = each * world
    torch.manual_seed(0)
    parts = [Part() for _ in range(count)]
    mine = range(rank, count, world)
    stages = [PipelineStage(parts[number], number, count, torch.device("cpu")) for number in mine]
    run: Any = getattr(schedules, kind)(
        stages[0] if each == 1 else stages, n_microbatches=CHUNKS, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD([p for number in mine for p in parts[number].parameters()], lr=0.1)
    for step in range(STEPS):
        given = [batch(step)] if rank == 0 else []
        run.step(*given, **({"target": -batch(step)} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[2], int(sys.argv[3]))
