"""Trains two linear layers for two steps; knows nothing of capd.

replayed_job.py bfloat16|float32 [bias]
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    torch.set_num_threads(1)
    bias = sys.argv[2:] == ["bias"]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(96, 160, bias=bias), nn.GELU(), nn.Linear(160, 64, bias=bias)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        model(torch.randn(3, 50, 96, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
