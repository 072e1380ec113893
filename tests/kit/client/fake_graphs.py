"""What of CUDA `torch.cuda.make_graphed_callables` needs behind its checks, on the CPU: graphs that compute again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Graph(TorchDispatchMode):
    """What was computed while it was recorded is computed again, into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._again: list[Callable[[], object]] = []

    def replay(self) -> None:
        for again in self._again:
            again()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:  # a view shows what its base has become
            self._again.append(lambda: result.copy_(func(*args, **kwargs)))
        return result


@contextmanager
def _recorded(graph: Graph, **_: object) -> Iterator[None]:
    with graph:
        yield


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it in the place of CUDA for one test."""
    for name, fake in {
        "CUDAGraph": Graph,
        "graph": _recorded,
        "Stream": object,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", object)
