"""What a watched model costs in steps that are not captured: CPU microseconds per Linear, above empty hooks.

Three models of one kind take turns forward by forward, because the speed of a virtual machine changes by the second;
and hooks go from one to the next, because where a model lies in memory matters more than what hooks do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import capd_client

NEVER = "1000000000-"
OF_LINEARS = ("input", "weight")  # an attention has none of them
FORWARDS = 100


def measure(make: Callable[[], nn.Module], tokens: Tensor, rounds: int) -> dict[str, float]:
    """CPU microseconds of a forward without hooks, and what empty hooks, and capd above them, add to it per Linear.

    Medians over the turns of a round, means over `rounds` x 3 of them: each model has each kind of hooks as often.
    """
    models = [make() for _ in range(3)]
    linears = sum(isinstance(module, nn.Linear) for module in models[0].modules())
    found: list[tuple[float, float, float]] = []
    for number in range(3 * rounds):
        turn = number % 3
        plain, empty, watched = (*models[turn:], *models[:turn])
        handles = [
            *(h for m in empty.modules() if m is empty or isinstance(m, nn.Linear) for h in _empty(m)),
            capd_client.watch(watched, steps=NEVER, tensors=OF_LINEARS),
        ]
        for model in (plain, empty, watched):
            model(tokens)  # the gate closes
        turns = [tuple(_forward(model, tokens) for model in (plain, empty, watched)) for _ in range(FORWARDS)]
        for handle in handles:
            handle.remove()
        found.append(
            (
                statistics.median(none for none, _, _ in turns),
                statistics.median(hooks - none for none, hooks, _ in turns) / linears,
                statistics.median(capd - hooks for _, hooks, capd in turns) / linears,
            )
        )
    names = ("forward without hooks", "empty hooks, per Linear", "capd above empty hooks, per Linear")
    return {
        name: statistics.mean(column) for name, column in zip(names, zip(*found, strict=True), strict=True)
    }


def _empty(module: nn.Module) -> list[Any]:
    """A pre-hook and a hook that do nothing, as capd's."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None: ...

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _forward(model: nn.Module, tokens: Tensor) -> float:
    start = time.thread_time()
    model(tokens)
    return (time.thread_time() - start) * 1e6
