"""Models in plain PyTorch, each with traits that a simpler tap gets wrong, for the job `plain_job.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import (
    scaled_dot_product_attention,
)  # as many a model does, before anything is watched

BATCH, SEQUENCE, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 6, 16, 4, 24, 32
HEAD_SIZE = WIDTH // HEADS
LAYERS, CHUNKS = 2, 2


class Attention(nn.Module):
    """Self-attention of its own making: q, k and v read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Block(nn.Module):
    """Attention and an MLP whose activation overwrites the product in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.relu_(self.up(x)))


class Decoder(nn.Module):
    """A language model whose head has the embedding's weight and is called once per chunk of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.cat([self.head(chunk) for chunk in x.chunk(CHUNKS, 1)], 1)


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    """[batch, positions, width] as [batch, heads, positions, size]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """The reverse of `split`."""
    return x.transpose(1, 2).flatten(2)


class Variants(nn.Module):
    """Every way to call scaled_dot_product_attention, each in a module of its own, on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.early = Early()
        self.masked = Masked(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril(1))
        self.biased = Masked(torch.linspace(-1, 1, SEQUENCE * SEQUENCE).view(SEQUENCE, SEQUENCE))
        self.dropped = Dropped()
        self.grouped = Grouped()
        self.crossing = Crossing()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.projection(x).chunk(3, -1))
        ways = (self.early, self.masked, self.biased, self.dropped, self.grouped, self.crossing, self.twice)
        return torch.stack([join(way(q, k, v)) for way in ways]).sum(0)


class Early(nn.Module):
    """The function by the name under which its file imported it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=0.3)


class Masked(nn.Module):
    """A mask of truth values or one that is added; operands as keywords."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=self.mask)


class Dropped(nn.Module):
    """With dropout."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 * self.training)


class Grouped(nn.Module):
    """Fewer heads of k and v than of q."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


class Crossing(nn.Module):
    """Fewer positions of k and v than of q."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])


class Twice(nn.Module):
    """Two calls in one forward; the second without gradients, as a target network does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        once = F.scaled_dot_product_attention(q, k, v)
        with torch.no_grad():
            target = F.scaled_dot_product_attention(v, k, q)
        return once + target


class Experts(nn.Module):
    """Experts with as many rows as fall to them: none, sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = self.inlet(x)
        parts = [expert(x[choice == number]) for number, expert in enumerate(self.experts)]
        return torch.cat(parts)
