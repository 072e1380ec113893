"""A job that captures tensors of several dtypes, shapes and values, and trains a small model."""

from __future__ import annotations

import os
import sys

import torch

import capd_client

STEPS = 8


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step: plain, small, large, transposed, empty, with NaN and Inf, of each source dtype."""
    made = torch.Generator().manual_seed(step)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    broken = normal(40, 64)
    broken[1, 2], broken[5, 6], broken[7, 8] = float("nan"), float("inf"), -float("inf")
    return {
        "bf16": normal(128, 256).to(torch.bfloat16),
        "fp16": (normal(96, 160) * 100).to(torch.float16),
        "fp32": normal(64, 64) * torch.exp(10 * normal(64, 64)),
        "fp64": normal(33, 47).to(torch.float64),
        "large": normal(700, 512).to(torch.bfloat16),
        "transposed": normal(64, 96).to(torch.bfloat16).t(),
        "broken": broken.to(torch.bfloat16),
        "one": normal(1),
        "empty": torch.empty(0, 32),
        "whole": torch.arange(12),
    }


def train() -> None:
    """Train two linear layers, with X, W and dY of each captured by `watch`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    capd_client.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(32, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    if "train" in sys.argv:
        train()
    else:
        for step in range(int(os.environ.get("LAB_STEPS", STEPS))):
            for name, tensor in tensors(step).items():
                capd_client.capture(tensor, tensor_name=name, iteration=step)
    assert capd_client.flush(timeout_s=60)
    capd_client.scalar("loss", 1.5)
    counters = capd_client.counters()
    assert not counters["dropped"], counters
    capd_client.close()


if __name__ == "__main__":
    main()
