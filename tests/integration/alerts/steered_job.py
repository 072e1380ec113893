"""Trains alone; one step has a NaN in its input, and the next one begins when a line is on standard input.

steered_job.py CAPTURED_STEPS
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import capd_client

BAD_STEP, STEPS = 11, 300


def main() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    capd_client.watch(model, steps=sys.argv[1])
    for step in range(STEPS):
        values = torch.randn(4, 8)
        if step == BAD_STEP:
            values[1, 2] = torch.nan
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == BAD_STEP:
            assert capd_client.flush(30)
            sys.stdin.readline()
    assert capd_client.flush(30)
    print("done", flush=True)
    sys.stdin.read()
    capd_client.close()


if __name__ == "__main__":
    main()
