"""What a watched model costs in steps that are not captured: CPU microseconds per hook, above empty hooks.

Whatever capd puts its hooks on has as many that do nothing in the model that it is compared with. Three models of one
kind take turns forward by forward, because the speed of a virtual machine changes by the second; and hooks go from one
to the next, because where a model lies in memory matters more than what hooks do.
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
    """CPU microseconds of a forward without hooks, and what empty hooks, and capd above them, add to it per hook.

    Medians over the turns of a round, means over `rounds` x 3 of them: each model has each kind of hooks as often.
    """
    models = [make() for _ in range(3)]
    found: list[tuple[float, float, float]] = []
    for number in range(3 * rounds):
        turn = number % 3
        plain, empty, watched = (*models[turn:], *models[:turn])
        watch = capd_client.watch(watched, steps=NEVER, tensors=OF_LINEARS)
        mirrored = _mirror(watched, empty)
        for model in (plain, empty, watched):
            model(tokens)  # the gate closes
        turns = [tuple(_forward(model, tokens) for model in (plain, empty, watched)) for _ in range(FORWARDS)]
        for handle in (watch, *mirrored):
            handle.remove()
        found.append(
            (
                statistics.median(none for none, _, _ in turns),
                statistics.median(hooks - none for none, hooks, _ in turns) / len(mirrored),
                statistics.median(capd - hooks for _, hooks, capd in turns) / len(mirrored),
            )
        )
    names = ("forward without hooks", "an empty hook", "capd above empty hooks, per hook")
    return {
        name: statistics.mean(column) for name, column in zip(names, zip(*found, strict=True), strict=True)
    }


def _mirror(watched: nn.Module, empty: nn.Module) -> list[Any]:
    """Hooks that do nothing on `empty`, one for each that is on `watched`; their handles."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None: ...

    handles: list[Any] = []
    for theirs, module in zip(watched.modules(), empty.modules(), strict=True):
        handles += [
            module.register_forward_pre_hook(before, with_kwargs=True) for _ in theirs._forward_pre_hooks
        ]
        handles += [module.register_forward_hook(after, with_kwargs=True) for _ in theirs._forward_hooks]
    return handles


def _forward(model: nn.Module, tokens: Tensor) -> float:
    start = time.thread_time()
    model(tokens)
    return (time.thread_time() - start) * 1e6
