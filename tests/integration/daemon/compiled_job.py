"""A rank that trains a model which captures by `watch` and by `capture` in its forward, compiled or not.

    python compiled_job.py eager|whole|blocks

Told what to do on its standard input, answers in JSON lines. What it computes follows from the iteration alone:
ranks that differ in nothing but how they are compiled capture the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import capd_client
from tests.kit.jobs.told_rank import ToldRank

MICRO_BATCHES = 2
TENSORS = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
SLICES = {"input": "first:3", "grad_output": "stride:2"}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        capd_client.capture(hidden, tensor_name="hidden", layer=self.number, slice="first:2")
        return x + self.down(hidden)


class Trainer(ToldRank):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.model = nn.Sequential(*(Block(number) for number in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        capd_client.watch(self.model, tensors=TENSORS, steps="all", select="[01].*", slices=SLICES)
        self.forward: Any = self.model
        if way == "whole":
            self.forward = torch.compile(self.model, backend="aot_eager", fullgraph=True)
        elif way == "blocks":
            for block in self.model:
                block.compile(backend="aot_eager", fullgraph=True)

    def step(self) -> None:
        iteration, total = len(self.losses), 0.0
        for micro_batch in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(10 * iteration + micro_batch)
            loss = self.forward(torch.randn(5, 8, generator=generator)).square().mean()
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total.hex())

    def obey(self, verb: str, *numbers: int) -> Any:
        if verb == "graphs":
            return torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return super().obey(verb, *numbers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(sys.argv[1]).serve()
