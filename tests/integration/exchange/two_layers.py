"""A model of two layers that trains two micro-batches: under capd, or with `msprobe TASK LEVEL DIR` under msprobe.

`scaled` multiplies one weight first.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main(*words: str) -> None:
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    if "scaled" in words:
        with torch.no_grad():
            model.get_parameter("layers.1.fc1.weight").mul_(3)
    debugger: Any = None
    if "msprobe" in words:
        # The tool is installed in an environment of its own.
        from msprobe.pytorch import PrecisionDebugger  # type: ignore[import-not-found]

        task, level, directory = words[1:]
        debugger = PrecisionDebugger(dump_path=directory, task=task, level=level)
        debugger.start(model=model)
    else:
        import capd_client

        capd_client.watch(model)
    for _ in range(2):
        batch = torch.randn(4, 8).to(torch.bfloat16)
        model(batch).float().pow(2).mean().backward()
    if debugger is not None:
        debugger.stop()
        with contextlib.suppress(AttributeError):
            debugger.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
