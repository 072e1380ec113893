"""A job that is planned, and then captured: DDP, gradient accumulation, slices, a selection, captures of its own.

plan_job.py STEPS    under torchrun, or alone
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import capd_client

MICRO_BATCHES = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def main(steps: int) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    train(steps, ranks, int(os.environ.get("RANK", "0")))
    # The model is gone: a DDP model that outlives its group may wait for gloo for ever (tests/kit/jobs/groups.py).
    if ranks > 1:
        dist.destroy_process_group()


def train(steps: int, ranks: int, rank: int) -> None:
    torch.manual_seed(3)
    model: nn.Module = Model()
    model = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    capd_client.watch(
        model,
        select="layers.*",
        tensors=("input", "weight", "output", "grad_output", "grad_weight"),
        slices={"input": "first:3", "weight": "stride:2"},
    )
    for step in range(steps):
        for _ in range(MICRO_BATCHES):
            # Steps and ranks differ in shape, as packed sequences do.
            loss = model(torch.randn(5 + step + rank, 8)).square().mean()
            loss.backward()
            capd_client.capture(loss, tensor_name="loss", component="loss")
        if step % 2 == 0:
            capd_client.capture(torch.ones(3, dtype=torch.int32), tensor_name="even")
            capd_client.capture(torch.ones(3, dtype=torch.complex64), tensor_name="unsupported")
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[1]))
