"""A job of three steps that is the same in every run, but for what its arguments change.

    python diverging_job.py [--flip ITERATION]

--flip: one bit of a weight of the second linear is flipped before that iteration.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import capd_client


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flip", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capd_client.watch(model, steps="all")
    for iteration in range(3):
        if iteration == args.flip:
            with torch.no_grad():
                model[2].weight.view(torch.int32)[0, 0] ^= 1 << 22
        loss = model(torch.randn(4, 16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
