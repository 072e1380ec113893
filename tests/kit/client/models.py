"""Small models of the hook tests, each with one trait that a simpler tap gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpoint = Optional[Callable[..., Any]]


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def non_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def selective(function: Callable[..., Any], *args: Any) -> Any:
    """Its modes see every operation of the segment, and save none."""
    contexts = partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class MLP(nn.Module):
    """fc1, an in-place ReLU, dropout, fc2."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.relu_(self.fc1(x))))


class Projections(nn.Module):
    """q, k and v read one input, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 5, bias=False)
        self.q = nn.Linear(5, 5, bias=False)
        self.k = nn.Linear(5, 5, bias=False)
        self.v = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        return self.q(x) * self.k(x) + self.v(x)


class Repeated(nn.Module):
    """One Linear, called `times` times in each forward, each call (or all of them) in its own checkpoint."""

    def __init__(self, times: int = 3, *, wrap: Checkpoint = None, wrap_all: Checkpoint = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self._times = times
        self._wrap = wrap or (lambda function, x: function(x))
        self._wrap_all = wrap_all or (lambda function, x: function(x))

    def forward(self, x: Tensor) -> Tensor:
        return self._wrap_all(self._body, x)

    def _body(self, x: Tensor) -> Tensor:
        for _ in range(self._times):
            x = self._wrap(lambda y: torch.tanh(self.fc(y)), x)
        return x


class Blocks(nn.Module):
    """Two MLP blocks with skip connections in a ModuleList, each optionally checkpointed."""

    def __init__(self, wrap: Checkpoint = None) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)
        )
        self._wrap = wrap or (lambda function, x: function(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = x + self._wrap(layer, x)
        return x
