"""What a watched model costs in steps that are not captured: CPU microseconds per Linear, above empty hooks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import capd_client

NEVER = "1000000000-"
FORWARDS = 100


def _empty(model: nn.Module) -> list[Any]:
    """A pre-hook and a hook that do nothing on every Linear, as capd's."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None: ...

    handles: list[Any] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    return handles


def measure(model: nn.Module, tokens: Tensor, rounds: int) -> dict[str, float]:
    """Medians of interleaved blocks: microseconds of one forward, and what capd adds to empty hooks per Linear."""
    ways: dict[str, Callable[[], list[Any]]] = {
        "none": list,
        "empty hooks": lambda: _empty(model),
        "capd, step not captured": lambda: [capd_client.watch(model, steps=NEVER)],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in (*ways, *ways)[number % 3 : number % 3 + 3]:
            handles = ways[name]()
            times[name] += _block(model, tokens)
            for handle in handles:
                handle.remove()
    medians = {name: statistics.median(found) for name, found in times.items()}
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    above = (medians["capd, step not captured"] - medians["empty hooks"]) / linears
    return {**medians, "capd above empty hooks, per Linear": above, "linears": linears}


def _block(model: nn.Module, tokens: Tensor) -> list[float]:
    model(tokens)  # the gate closes
    found = []
    for _ in range(FORWARDS):
        start = time.thread_time()
        model(tokens)
        found.append((time.thread_time() - start) * 1e6)
    return found
