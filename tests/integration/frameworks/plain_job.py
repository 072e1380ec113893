"""A job that trains plain PyTorch models one after the other, each for some steps, each watched under its name.

Prints the losses as JSON. The biases, which no store holds, go with `--biases FILE` to the test that computes products.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import capd_client
from tests.kit.models import plain_models as models

STEPS, MICRO_BATCHES = 2, 2
GRADIENTS = ("grad_output", "grad_input", "grad_weight", "grad_query", "grad_key", "grad_value")
TENSORS = ("input", "weight", "query", "key", "value", "output", *GRADIENTS)


class Case(NamedTuple):
    """A model and the loss of one micro-batch of it."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator, int], Tensor]


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(models.VOCABULARY, (models.BATCH, models.SEQUENCE), generator=generator)


def vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(models.BATCH, models.SEQUENCE, models.WIDTH, generator=generator)


def language_loss(model: nn.Module, generator: torch.Generator, micro_batch: int) -> Tensor:
    t = tokens(generator)
    return F.cross_entropy(model(t).flatten(0, 1), t.roll(-1, 1).flatten())


def square_loss(model: nn.Module, generator: torch.Generator, micro_batch: int) -> Tensor:
    x = vectors(generator)
    return F.mse_loss(model(x), x.roll(1, -1))


def gpt2_loss(model: nn.Module, generator: torch.Generator, micro_batch: int) -> Tensor:
    t = tokens(generator)
    return model(input_ids=t, labels=t).loss


def rows_of(micro_batch: int) -> tuple[int, int, int]:
    """How many rows each expert gets."""
    return ((7, 5, 0), (2, 3, 7))[micro_batch]


def experts_loss(model: nn.Module, generator: torch.Generator, micro_batch: int) -> Tensor:
    choice = torch.repeat_interleave(torch.arange(3), torch.tensor(rows_of(micro_batch)))
    return model(vectors(generator).flatten(0, 1), choice).square().mean()


CASES: dict[str, Case] = {
    "decoder": Case(models.Decoder, language_loss),
    "variants": Case(models.Variants, square_loss),
    "experts": Case(models.Experts, experts_loss),
    "attentions": Case(models.Attentions, square_loss),
    "translator": Case(models.Translator, square_loss),
    "odd": Case(models.Odd, square_loss),
    "gpt2": Case(models.gpt2, gpt2_loss),
    "adapted": Case(models.adapted, language_loss),
    "quantised": Case(models.Quantised, square_loss),
}


def train(name: str, case: Case, biases: dict[tuple[str, int, str], Tensor], first: int) -> list[float]:
    """Train one model; its iterations are `first` and those after it."""
    torch.manual_seed(5)
    model = case.build()
    handle = capd_client.watch(model, name=name, steps="all", tensors=TENSORS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(first, first + STEPS):
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                biases[name, step, key] = parameter.detach().clone()
        for micro_batch in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(100 * step + micro_batch)
            loss = case.loss(model, generator, micro_batch) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--biases")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    biases: dict[tuple[str, int, str], Tensor] = {}
    losses = {
        name: train(name, CASES[name], biases, STEPS * number) for number, name in enumerate(options.cases)
    }
    if options.biases:
        torch.save(biases, options.biases)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
