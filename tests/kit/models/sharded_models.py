"""A tiny transformer, the ways to shard it, and what a watch of each has to capture: from its sizes alone."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.kit.expected import Expected

WIDTH, HEADS, HIDDEN, WORDS, LAYERS = 8, 2, 16, 12, 1
ROWS, TOKENS = 2, 4  # of one micro-batch on one rank
STEPS, MICRO_BATCHES = 2, 2

LINEARS = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH),
           "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}  # fmt: skip
"""Name in a block → [out, in] of its weight."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(*LINEARS[name][::-1], bias=False))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            getattr(self, name)(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = (nn.Linear(*LINEARS[name][::-1], bias=False) for name in ("up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Its blocks, and what is in front and behind of them where this part of the model has it."""

    def __init__(self, layers: int = LAYERS, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if first else None
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Stage(Transformer):
    """A part of a pipeline; says itself what comes in and goes out."""

    def __init__(self, number: int, of: int) -> None:
        super().__init__(1, first=number == 0, last=number == of - 1)
        self.mix = nn.Linear(WIDTH, WIDTH)  # of rows: its output is the product itself and no view of it
        self.number = number
        self.case = ""  # empty: says nothing

    def forward(self, x: Tensor) -> Tensor:
        self.say(x, "received")
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        x = x + self.mix(x.flatten(0, 1)).view_as(x)
        self.say(x, "handed_on")
        return x if self.head is None else self.head(x)

    def say(self, x: Tensor, name: str) -> None:
        if self.case:
            import capd_client  # not above: a job that knows nothing of capd has these models, too

            capd_client.capture(x.detach(), tensor_name=name, module=f"{self.case}.stage{self.number}")


def checkpointed(model: Transformer, kind: Any) -> Transformer:
    """Its blocks compute their activations a second time in the backward; `kind` is a CheckpointImpl."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    wrap = functools.partial(wrapping.checkpoint_wrapper, checkpoint_impl=kind)
    wrapping.apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Block))
    return model


def batch(step: int, micro_batch: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and what comes next, [ROWS, TOKENS] each: other ones everywhere."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    words = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tensor_parallel(model: Transformer, mesh: Any, *, sequence: bool) -> None:
    """Column- and rowwise linears over `mesh`; with `sequence` the norms work on their part of the tokens."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tokens = Shard(1)
    column = ColwiseParallel(input_layouts=tokens) if sequence else ColwiseParallel()
    row = RowwiseParallel(output_layouts=tokens) if sequence else RowwiseParallel()
    plan: dict[str, Any] = {"attention.o": row, "up": column, "down": row}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
        plan |= {"attention": whole, "before_attention": SequenceParallel(), "before_mlp": SequenceParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    if sequence:
        parts = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=tokens)
        parallelize_module(
            model,
            mesh,
            {"embed": parts, "head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())},
        )


def expect(found: Expected, name: str, *, parts: int = 1, split_head: bool = False) -> None:
    """Add all that a watch of a Transformer captures, every linear split into `parts`; `name`: the watch's."""
    from capd_client.protocol.kinds import ATTENTION, LINEAR

    rows = (ROWS, TOKENS)
    for layer, (linear, (out, into)) in itertools.product(range(LAYERS), LINEARS.items()):
        module = f"{name}.layers.{layer}." + (linear if linear in ("up", "down") else f"attention.{linear}")
        by_rows = linear in ("o", "down")
        inputs, outputs = (into // parts, out) if by_rows else (into, out // parts)
        found.linear(module, rows, inputs, outputs, tensors=LINEAR.tensors, at=(layer, name))
    heads = (ROWS, HEADS // parts, TOKENS, WIDTH // HEADS)
    for layer in range(LAYERS):
        shapes = dict.fromkeys(("query", "key", "value", "output"), heads)
        module = f"{name}.layers.{layer}.attention"
        found.attention(module, shapes, tensors=ATTENTION.tensors, at=(layer, name))
    words = WORDS // parts if split_head else WORDS
    found.linear(f"{name}.head", rows, WIDTH, words, tensors=LINEAR.tensors)
