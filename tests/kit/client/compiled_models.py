"""Models to compile, what trains them, and the comparison of what is captured then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capd_client import watch
from capd_client.protocol.kinds import LINEAR
from tests.kit.client.sink import Captured, MemorySink

Step = Callable[[Tensor], Tensor]

COMPILING = [
    pytest.mark.usefixtures("forget_graphs"),
    # what torch itself warns of while it compiles, with and without capd
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width // 6)
        self.down = nn.Linear(8 * width // 6, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(x)))


class Regional(nn.Module):
    """Blocks that are compiled one by one, between parts that are not; each in its own checkpoint, all in one."""

    def __init__(self, wrap: Callable[..., Any] | None = None, *, nested: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self._wrap = wrap or (lambda function, x: function(x))
        self._nested = nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        return self._wrap(self._body, x) if self._nested else self._body(x)

    def _body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._wrap(layer, x)
        return x


def taken(sink: MemorySink) -> list[Captured]:
    """What was captured; the sink starts anew, at the first step."""
    captured, sink.captured = sink.captured, []
    sink.begin_at()
    return captured


def same(ours: list[Captured], theirs: list[Captured], *, exact: bool = True) -> None:
    """Both captured the same tensors at the same moments, each once."""
    first, second = (
        {(c.key, c.at, tuple(c.attributes.items())): c for c in captured} for captured in (ours, theirs)
    )
    assert len(first) == len(ours)
    assert len(second) == len(theirs)
    assert first.keys() == second.keys()
    for at, capture in first.items():
        if exact:
            assert torch.equal(capture.value, second[at].value), at
        else:
            torch.testing.assert_close(capture.value, second[at].value)


def train(call: Step, model: nn.Module, *, steps: int = 3) -> list[Tensor]:
    """Steps of two micro-batches, in turn one after the other and both forwards first; losses and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    results: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = [torch.randn(2, 5, width, generator=generator, requires_grad=True) for _ in range(2)]
        if step % 2:
            losses = [call(x).square().sum() for x in inputs]
            for loss in losses:
                loss.backward()
        else:
            losses = []
            for x in inputs:
                losses.append(call(x).square().sum())
                losses[-1].backward()
        results += [loss.detach() for loss in losses]
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return results


def reference(
    sink: MemorySink, model: nn.Module, *, select: str | None = None, **how: Any
) -> tuple[list[Captured], list[Tensor]]:
    """What an uncompiled copy of `model` captures, and what it computes."""
    model = copy.deepcopy(model)
    handle = watch(model, tensors=LINEAR.tensors, select=select)
    results = train(model, model, **how)
    handle.remove()
    return taken(sink), results


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)
