"""A rank that trains a model which captures by `watch` and by `capture` in its forward, compiled or not.

    python compiled_job.py eager|whole|blocks

Told what to do on its standard input, answers in JSON lines. What it computes follows from the iteration alone:
ranks that differ in nothing but how they are compiled capture the same.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn

import capd_client
from tests.integration.train_job import answer

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


class Trainer:
    def __init__(self, way: str) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(*(Block(number) for number in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses: list[str] = []
        self.stop = threading.Event()
        self.worker: threading.Thread | None = None
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

    def run(self) -> None:
        """Train until told to stop, at a pace that a busy machine's daemon keeps up with."""
        while not self.stop.wait(0.03):
            self.step()

    def obey(self, verb: str, *numbers: int) -> Any:
        if verb == "train":
            for _ in range(numbers[0]):
                self.step()
            return len(self.losses)
        if verb == "run":
            self.worker = threading.Thread(target=self.run)
            self.worker.start()
            return "running"
        if verb == "halt":
            assert self.worker is not None
            self.stop.set()
            self.worker.join()
            return len(self.losses)
        if verb == "losses":
            return self.losses
        if verb == "graphs":
            return torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert verb == "counters", verb
        return capd_client.counters()


def main() -> None:
    torch.set_num_threads(1)
    trainer = Trainer(sys.argv[1])
    answer("ready")
    for line in iter(sys.stdin.readline, ""):
        verb, *numbers = line.split()
        if verb == "leave":
            break
        answer(trainer.obey(verb, *map(int, numbers)))
    capd_client.close()


if __name__ == "__main__":
    main()
