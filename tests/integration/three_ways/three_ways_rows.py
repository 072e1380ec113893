"""Rows of plain PyTorch: training scripts as users write them, which know nothing of capd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.kit.models import plain_models as models

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script

Losses = list[Tensor]
STEPS, MICRO_BATCHES = 2, 3


class Row(NamedTuple):
    """A script.

    ranks: of torchrun, which starts it if there are several. imports: modules that take time to import. default:
    whether the default tier runs it. package: one that capd's development does not need, as for `launching.needs`.
    launched: torchrun starts it though it is one rank.
    """

    run: Callable[[Script], Losses]
    ranks: int = 1
    imports: tuple[str, ...] = ()
    default: bool = False
    package: str = ""
    launched: bool = False


def vectors(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(models.BATCH, models.SEQUENCE, models.WIDTH, generator=generator)


def square(model: Callable[..., Any], seed: int) -> Tensor:
    return (model(vectors(seed)) - vectors(seed + 1)).square().mean()


def words(model: Callable[..., Any], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(models.VOCABULARY, (models.BATCH, models.SEQUENCE), generator=generator)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def moments(script: Script) -> Iterator[tuple[int, int, int]]:
    """Iteration, micro-batch and a seed of each, where the script is in turn."""
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            script.at(step, micro_batch)
            yield step, micro_batch, 100 * step + micro_batch
            script.off()


def loop(script: Script, model: Any, loss_of: Callable[[Any, int], Tensor]) -> Losses:
    """Gradient accumulation, AdamW, an evaluation after each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _, micro_batch, seed in moments(script):
        loss = loss_of(model, seed) / MICRO_BATCHES
        loss.backward()
        losses.append(loss.detach())
        if micro_batch == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
            script.off()
            with torch.no_grad():
                model.eval()
                losses.append(loss_of(model, 7))
                model.train()
    return losses


def plain(script: Script) -> Losses:
    """Tied weights, a head that is called twice, an activation in place."""
    model = models.Decoder()
    script.watch(model)
    return loop(script, model, words)


def autocast(script: Script) -> Losses:
    model = models.Decoder()
    script.watch(model)

    def loss_of(model: nn.Module, seed: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return words(model, seed)

    return loop(script, model, loss_of)


def encoder(script: Script) -> Losses:
    layer = nn.TransformerEncoderLayer(models.WIDTH, models.HEADS, models.HIDDEN, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    script.watch(model)
    return loop(script, model, square)


def translator(script: Script) -> Losses:
    """A decoder layer of torch's after its encoder: attention with a key and value of their own."""
    model = models.Translator()
    script.watch(model)
    return loop(script, model, square)


def variants(script: Script) -> Losses:
    model = models.Variants()
    script.watch(model)
    return loop(script, model, square)


def odd(script: Script) -> Losses:
    """Weights that are computed, and a Linear with a forward of its own."""
    model = models.Odd()
    script.watch(model)
    return loop(script, model, square)


def compiled(script: Script) -> Losses:
    model = models.Decoder()
    script.watch(model)
    return loop(script, torch.compile(model, backend="aot_eager"), words)


def compiled_blocks(script: Script) -> Losses:
    model = models.Decoder()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    script.watch(model)
    return loop(script, model, words)


class Checkpointed(models.Decoder):
    """Its blocks compute their activations a second time in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.training else layer(x)
        return self.head(x)


def checkpointed(script: Script) -> Losses:
    model = Checkpointed(reentrant=False)
    script.watch(model)
    return loop(script, model, words)


def checkpointed_reentrant(script: Script) -> Losses:
    model = Checkpointed(reentrant=True)
    script.watch(model)
    return loop(script, model, words)


def several(script: Script) -> Losses:
    """Two models that train side by side."""
    reader, writer = models.Block(), models.Block()
    script.watch(reader, name="reader")
    script.watch(writer, name="writer")
    optimizer = torch.optim.SGD([*reader.parameters(), *writer.parameters()], lr=0.1)
    losses = []
    for _, micro_batch, seed in moments(script):
        loss = square(lambda x: writer(reader(x)), seed)
        loss.backward()
        losses.append(loss.detach())
        if micro_batch == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


ROWS: dict[str, Row] = {
    "plain": Row(plain, default=True),
    "autocast": Row(autocast),
    "encoder": Row(encoder),
    "translator": Row(translator),
    "variants": Row(variants),
    "odd": Row(odd),
    "several": Row(several),
    "compiled": Row(compiled),
    "compiled_blocks": Row(compiled_blocks),
    "checkpointed": Row(checkpointed),
    "checkpointed_reentrant": Row(checkpointed_reentrant),
}
