"""A small transformer whose products can lie in checkpoints, and one training step of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kit.client.models import Checkpoint

RECIPES = {
    "straight-through": {"linear": "mxfp8", "qk": "mxfp4", "pv": "mxfp8"},
    "exact": {"linear": "hifp8", "qk": "mxfp4", "pv": "mxfp8", "level": "exact"},
}


class Scaled(nn.Linear):
    """Calls F.linear in a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * functional.linear(input, self.weight, self.bias)


class Layer(nn.Module):
    """Its attention may lie in a checkpoint of its own, and is repeated outside of any module then."""

    def __init__(self, inner: Checkpoint = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32, bias=False)
        self.up = Scaled(32, 32)
        self._inner = inner or (lambda function, *args: function(*args))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(self._inner(self._attend, q, k, v).transpose(1, 2).flatten(2))
        return x + self.up(torch.tanh(x))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    def __init__(self, outer: Checkpoint = None, inner: Checkpoint = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(inner) for _ in range(2))
        self._outer = outer or (lambda function, x: function(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._outer(layer, x)
        return x


def inputs() -> Tensor:
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    y = model(x)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), *grads]


def twin(model: nn.Module, **kwargs: Any) -> Model:
    """A model with the same parameters, made another way."""
    other = Model(**kwargs)
    other.load_state_dict(model.state_dict())
    return other


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))
