"""The model of the corpus: a small Llama-like language model, trained on bytes of the machine's text.

Its linears pass the operands of their matrix products to `Taps`, forward and backward. Everything is seeded and
single-threaded, so that the same text and the same torch make the same tensors.
"""

from __future__ import annotations

import contextlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Size", "Taps", "capture", "make_text", "train"]

VOCABULARY = 256
PEAK_LEARNING_RATE = 1e-3
# The share of the steps.
WARM_UP = 0.1
KEPT_BATCH_SEED = 1


@dataclass(frozen=True)
class Size:
    """The extents of the model and its training.

    `sequences` are those of the kept batch and of the training batches.
    """

    width: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    sequences: int
    training_sequences: int
    steps: int
    text_nbytes: int


class Taps:
    """A collection of tensors under "layer.module.name", and of their gradients under "layer.module.grad_name"."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Keep `tensor` and, later, its gradient. The result is an alias, so the gradient is of this use alone."""
        alias = tensor.view_as(tensor)
        self.tensors[name] = alias.detach()
        prefix, _, last = name.rpartition(".")
        alias.register_hook(lambda grad: self.tensors.__setitem__(f"{prefix}.grad_{last}", grad.detach()))
        return alias


class Module(nn.Module):
    """A module with a place for taps."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tap_name = name
        self.taps: Taps | None = None

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        """Return `tensor`. If taps are set, they keep it."""
        return tensor if self.taps is None else self.taps(f"{self.tap_name}.{name}", tensor)


class Linear(Module):
    """A linear without bias that taps the operands of its product, in the dtype that the product uses."""

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        super().__init__(name)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(0.0, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return self.tap("output", F.linear(self.tap("input", x), self.weight))


class Block(Module):
    """A pre-norm transformer block: attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, index: int, size: Size) -> None:
        super().__init__(f"{index}.attention")
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        names = ("q", "k", "v", "o")
        self.q, self.k, self.v, self.o = (Linear(f"{index}.{n}", size.width, size.width) for n in names)
        self.gate, self.up = (Linear(f"{index}.{n}", size.width, size.hidden) for n in ("gate", "up"))
        self.down = Linear(f"{index}.down", size.hidden, size.width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            m(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        q = self.tap("query", _rotate(q, cosine, sine))
        k = self.tap("key", _rotate(k, cosine, sine))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-right, left), dim=-1) * sine).to(x.dtype)


class Model(nn.Module):
    """A byte-level model: byte values in, mean cross entropy of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        nn.init.normal_(self.embedding.weight, 0.0, 0.02)
        self.blocks = nn.ModuleList(Block(index, size) for index in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.sequence), 10000.0 ** (-torch.arange(half) / half)).repeat(
            1, 2
        )
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_text(nbytes: int) -> bytes:
    """Return the first `nbytes` of the standard library's sources and the installed packages' copyright files."""
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    sources = [path for path in library if "site-packages" not in path.parts]
    licences = sorted(Path("/usr/share/doc").glob("*/copyright"))
    text = bytearray()
    for path in (*sources[::2], *licences, *sources[1::2]):
        if len(text) >= nbytes:
            break
        with contextlib.suppress(OSError):
            text += path.read_bytes()
    return bytes(text[:nbytes])


def _batch(text: Tensor, count: int, sequence: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - sequence - 1, (count,), generator=generator).tolist()
    return torch.stack([text[start : start + sequence + 1] for start in starts]).long()


def _learning_rate(step: int, steps: int) -> float:
    warm_up = max(1, int(WARM_UP * steps))
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    return PEAK_LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(text: bytes, size: Size) -> tuple[Model, list[float]]:
    """Train with AdamW under bfloat16 autocast. Returns the model and the loss of every step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, generator = Model(size), torch.Generator().manual_seed(0)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, size.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(_batch(data, size.training_sequences, size.sequence, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def capture(model: Model, text: bytes, size: Size, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tap in one forward and backward whose products run in `dtype`.

    Besides the taps' own names there are "layer.module.weight" and "layer.module.grad_weight".
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(KEPT_BATCH_SEED)
    tokens = _batch(data, size.sequences, size.sequence, generator)
    taps = Taps()
    modules = [module for module in model.modules() if isinstance(module, Module)]
    for module in modules:
        module.taps = taps
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(tokens)
    loss.backward()
    yield from taps.tensors.items()
    for module in modules:
        module.taps = None
        if isinstance(module, Linear):
            yield f"{module.tap_name}.weight", module.weight.detach().to(dtype)
            assert module.weight.grad is not None
            yield f"{module.tap_name}.grad_weight", module.weight.grad.to(dtype)
    model.zero_grad()
