"""Trains with two ranks over gloo; at one step one rank has a NaN in its input. It ends when its standard input does.

nan_job.py STEPS STEP RANK
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import capd_client

STEPS, BAD_STEP, BAD_RANK = map(int, sys.argv[1:])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    capd_client.watch(model, steps="all")
    for step in range(STEPS):
        values = torch.randn(4, 8)
        if (step, rank) == (BAD_STEP, BAD_RANK):
            values[1, 2] = torch.nan
        loss = model(values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # The NaN of one rank must not reach the other one.
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0)
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if (step, rank) == (BAD_STEP, BAD_RANK):
            assert capd_client.flush(30)
            print(time.time_ns(), flush=True)
    assert capd_client.flush(30)
    print("done", flush=True)
    sys.stdin.read()
    capd_client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main()
