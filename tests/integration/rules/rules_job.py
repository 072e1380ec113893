"""A rank that trains a small transformer for a few steps, unwatched and watched: `rules_job.py eager|compiled`.

What is captured is said by its capd.toml alone. Prints the losses of both, and its counters, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import capd_client

LAYERS, STEPS, MICRO_BATCHES, HEADS, TOKENS, WIDTH = 3, 5, 2, 2, 4, 8


class Attention(nn.Module):
    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = qkv.shape
        query, key, value = (
            part.reshape(batch, tokens, HEADS, -1).transpose(1, 2) for part in qkv.split(width // 3, dim=2)
        )
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).reshape(batch, tokens, width // 3)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attn, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.qkv(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(way: str) -> list[str]:
    torch.manual_seed(11)
    model = Model()
    if way != "plain":
        capd_client.watch(model)
    forward: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            seed = 1000 * int(os.environ["RANK"]) + 10 * step + micro_batch
            x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = forward(x).square().mean()
            loss.backward()
            losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, losses = train("plain"), train(sys.argv[1])
    capd_client.close()
    print(json.dumps({"plain": plain, "losses": losses, "counters": capd_client.counters()}))
