"""A rank that trains a small model step by step, as it is told on its standard input; answers in JSON lines.

Everything that it computes follows from its rank and the iteration, so what should be captured is known without it.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
from torch import nn

import capd_client
from tests.kit.jobs.told_rank import ToldRank, answer

MICRO_BATCHES = 2
WATCHED = ("layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2")
LEFT_OUT = "head"
TENSORS = ("input", "weight", "output", "grad_output")


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


class Trainer(ToldRank):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.rank = rank
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        capd_client.watch(self.model, steps=os.environ.get("TRAIN_STEPS", "all"), select="layers.*")

    def step(self, hang: threading.Event | None = None) -> None:
        """One iteration; waits for `hang` in the middle of it."""
        iteration = len(self.losses)
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(1000 * self.rank + 10 * iteration + micro_batch)
            loss = self.model(torch.randn(5, 8, generator=generator)).square().mean()
            if hang is not None and micro_batch == 0:
                answer("hanging")
                hang.wait()
            loss.backward()
            total += float(loss.detach())
        capd_client.capture(torch.tensor([total]), tensor_name="loss")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total)

    def obey(self, verb: str, *numbers: int) -> Any:
        return self.hang() if verb == "hang" else super().obey(verb, *numbers)

    def hang(self) -> int:
        """One step that stays in its forward until the next line comes."""
        go = threading.Event()
        worker = threading.Thread(target=self.step, args=(go,))
        worker.start()
        sys.stdin.readline()
        go.set()
        worker.join()
        return len(self.losses)


if __name__ == "__main__":
    Trainer(int(os.environ["RANK"])).serve()
