"""Tiny jobs whose weights or gradients are more than those of one product: tied, gathered, summed over micro-batches.

    python -m tests.integration.check.shared_weights_job NAME

NAME: see `JOBS`. "gathered" wants torchrun with two ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import capd_client
from tests.kit.jobs.groups import leave_group

WORDS, WIDTH, ROWS, STEPS = 24, 16, 12, 2
TENSORS = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")


class Tied(nn.Module):
    """A head with the embedding's weight. late: it is tied after the model is watched."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(words)))
        logits: Tensor = self.head(hidden)
        return F.cross_entropy(logits, words.roll(1))


class TwoUses(nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(self.embedding(words))))
        return found.square().mean()


class _Gather(torch.autograd.Function):
    """The parts of all ranks, one below the other; its gradient is the rank's part of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.detach())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class GatheredLinear(nn.Linear):
    """A linear of which each rank has a part of the weight, and gathers it in its forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS // dist.get_world_size(), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _Gather.apply(self.weight))


class Gathered(nn.Module):
    """A model with a gathered weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), GatheredLinear()

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.embedding(words))))
        return F.cross_entropy(logits, words.roll(1))


def train(model: Any, *, forwards: int = 1, late: bool = False) -> None:
    """Train. forwards: those of one backward. late: tie the head after the model is watched."""
    handle = capd_client.watch(model, steps="all", tensors=TENSORS)
    if late:
        model.tie()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            words = torch.randint(0, WORDS, (forwards, ROWS), generator=generator)
            torch.stack([model(one) for one in words]).sum().backward()
        optimizer.step()
    handle.remove()


def gathered() -> None:
    dist.init_process_group("gloo")
    train(Gathered())
    leave_group()


JOBS = {
    "tied": lambda: train(Tied()),
    "tied_late": lambda: train(Tied(is_tied=False), late=True),
    "two_uses": lambda: train(TwoUses()),
    "one_backward": lambda: train(Tied(is_tied=False), forwards=2),
    "gathered": gathered,
}


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("RANK", 0)) if sys.argv[1] == "gathered" else 0)
    torch.set_num_threads(1)
    JOBS[sys.argv[1]]()
    capd_client.close()
