"""Orders of `capd ctl` to a watch, and what it captures under them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from capd_client.protocol.control import Steer
from capd_client.protocol.selection import Selection
from tests.kit.client.sink import MemorySink

_ids = itertools.count(1)


def steer(sink: MemorySink, *, capturing: bool = True, at: int = 0, **selection: Any) -> None:
    """What the client thread does with the daemon's word."""
    wanted = Selection(**selection) if selection else None
    sink.steering.receive(Steer(id=next(_ids), from_iteration=at, capturing=capturing, selection=wanted))


def train(model: nn.Module, steps: int = 1, micro_batches: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(micro_batches):
            model(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def taken(sink: MemorySink) -> Counter[tuple[int, str, str]]:
    """How often each (iteration, module, tensor) was captured since the last look."""
    found = Counter((c.moment.iteration, c.key.module, c.key.tensor_name) for c in sink.captured)
    sink.captured.clear()
    return found


def of(iteration: int, modules: Iterable[str], tensors: Iterable[str]) -> Counter[tuple[int, str, str]]:
    return Counter((iteration, module, tensor) for module in modules for tensor in tensors)


OPERANDS = ("input", "weight", "output", "grad_output")
