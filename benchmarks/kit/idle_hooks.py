"""The cost of a watched model in steps that are not captured: CPU microseconds per hook, above empty hooks.

The compared model has an empty hook for each hook of capd. Three models of one kind take turns, forward by forward,
because the speed of a virtual machine changes by the second. The hooks move from one model to the next, because a
model's place in memory matters more than its hooks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import capd_client

NEVER = "1000000000-"
# An attention has none of these operands.
OF_LINEARS = ("input", "weight")
FORWARDS = 100


def measure(make: Callable[[], nn.Module], tokens: Tensor, rounds: int) -> dict[str, float]:
    """Return the CPU microseconds of a forward without hooks, and the extra cost of each kind of hooks per hook.

    The kinds are empty hooks and capd's above empty ones. The results are medians over the turns of a round, and
    means over `rounds` x 3 rounds. Each model has each kind of hooks equally often.
    """
    models = [make() for _ in range(3)]
    found: list[tuple[float, float, float]] = []
    for number in range(3 * rounds):
        turn = number % 3
        plain, empty, watched = (*models[turn:], *models[:turn])
        watch = capd_client.watch(watched, steps=NEVER, tensors=OF_LINEARS)
        mirrored = _mirror(watched, empty)
        for model in (plain, empty, watched):
            # This forward closes the gate.
            model(tokens)
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
    """Put an empty hook on `empty` for each hook on `watched`. Returns their handles."""

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
