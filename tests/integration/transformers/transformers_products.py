"""What a model computes: its matrix products, written down from its configuration alone.

The name, layer and stack of every product of one forward, and the shapes of its tensors. Nothing here asks a module, a
hook or capd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 37, 16, 24, 4, 2, 4
LAYERS, EXPERTS, TOP_K = 2, 8, 2
BATCH, SEQUENCE, FRAMES, MELS = 2, 5, 12, 8
STEPS, MICRO_BATCHES = 2, 2

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """One matrix product of a forward.

    shapes: of the operands, the parameter and the output. source: for an attention, the modules whose outputs are its
    query, key and value, where nothing lies between. target: the module that its output is the input of.
    """

    module: str
    layer: int | None
    stack: str
    component: str
    shapes: dict[str, Shape]
    transposed: bool = False  # the weight is [in, out]
    causal: bool = False
    scale: float = HEAD**-0.5
    source: tuple[str, ...] = ()
    target: str = ""
    lacks: tuple[str, ...] = ()  # gradients that nothing computes
    tied: bool = False  # its weight is that of the embedding, whose gradient is added
    bias: torch.Tensor | None = field(
        default=None, compare=False
    )  # what attention adds to scores: [heads, q, k]
    heads_first: bool = False  # the attention's output is [batch, heads, sequence, head]


@dataclass(frozen=True)
class Model:
    """How to make a model (its weights follow from the seed), a batch of it, and what it computes."""

    make: Callable[[], Any]
    batch: Callable[[int], dict[str, torch.Tensor]]
    products: list[Product] = field(default_factory=list)


def tokens(number: int) -> dict[str, torch.Tensor]:
    """Batch `number` of a causal model; another one for every number."""
    drawn = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(number))
    return {"input_ids": drawn, "labels": drawn.clone()}


def linear(
    module: str,
    inside: int,
    outside: int,
    *,
    layer: int | None = None,
    stack: str = "",
    rows: Shape = (),
    **more: Any,
) -> Product:
    """Y = XWᵀ; `rows` are the dimensions of X before its last one."""
    rows = rows or (BATCH, SEQUENCE)
    weight = (inside, outside) if more.get("transposed") else (outside, inside)
    shapes = {"input": (*rows, inside), "weight": weight, "output": (*rows, outside)}
    return Product(module, layer, stack, "linear", shapes, **more)


def attention(
    module: str, *, layer: int, stack: str, kv_heads: int = HEADS, queries: int = SEQUENCE, keys: int = SEQUENCE,
    head: int = HEAD, value_head: int = HEAD, batch: int = BATCH, **more: Any,
) -> Product:  # fmt: skip
    """Query, key and value as [batch, heads, sequence, head], the output as [batch, sequence, heads, head]."""
    shapes = {
        "query": (batch, HEADS, queries, head), "key": (batch, kv_heads, keys, head),
        "value": (batch, kv_heads, keys, value_head), "output": (batch, queries, HEADS, value_head),
    }  # fmt: skip
    return Product(module, layer, stack, "FA", shapes, **more)


def router(module: str, *, layer: int) -> Product:
    return linear(module, WIDTH, EXPERTS, layer=layer, stack="model", rows=(BATCH * SEQUENCE,))


def experts(module: str, *, layer: int, width: int) -> list[Product]:
    """Two grouped products, their rows sorted by expert; `offsets` says where each expert's rows end."""
    rows, products = BATCH * SEQUENCE * TOP_K, []
    for name, inside, outside in (("gate_up_proj", WIDTH, 2 * width), ("down_proj", width, WIDTH)):
        shapes = {
            "input": (rows, inside), "offsets": (EXPERTS,), "weight": (EXPERTS, outside, inside),
            "output": (rows, outside),
        }  # fmt: skip
        products.append(Product(f"{module}.{name}", layer, "model", "grouped_linear", shapes))
    return products
