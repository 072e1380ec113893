"""CUDA graphs that Inductor makes are cut at capd's operators, whose bodies a replay would not call.

Inductor cuts where it finds the tag `cudagraph_unsafe`, but looks for it at the higher-order operator that carries an
effect through the graph, not at the operator with the effect. So capd's operators are named in its configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["cuts_at", "missing_cuts"]


def cuts_at(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` of the operator `name`, which also has Inductor cut there, wherever that comes by to lower the operator.

    Inductor's configuration is of one thread (torch 2.13), and of the call of torch.compile that brought options along.
    A backward is compiled when it runs first, on the thread that it runs on. There, and right before the decision,
    Inductor asks the fake what the operator returns.
    """

    def asked(*args: Any, **kwargs: Any) -> Any:
        _cut_at(name)
        return fake(*args, **kwargs)

    return asked


def _cut_at(name: str) -> None:
    config = _config()
    if not _makes_cuda_graphs(config):
        return  # what is set stands in the keys of Inductor's caches: those of other jobs stay as they are
    names = getattr(config, "custom_should_partition_ops", None)
    if names is not None and name not in names:
        config.custom_should_partition_ops = [*names, name]  # the list may be the job's own


def missing_cuts() -> str:
    """Why operators of the graph that is traced would land inside CUDA graphs; empty where they do not."""
    config = _config()
    if not _makes_cuda_graphs(config):
        return ""
    if not hasattr(config, "custom_should_partition_ops"):
        return "this torch cannot keep operators out of its CUDA graphs; compile without these to capture"
    if not getattr(config, "graph_partition", False):
        return (
            "its CUDA graphs are not cut at operators; "
            "set torch._inductor.config.graph_partition = True to capture"
        )
    return ""


def _config() -> Any:
    """Inductor's, if it compiles at all: importing it takes a second that other backends do not need."""
    return sys.modules.get("torch._inductor.config")


def _makes_cuda_graphs(config: Any) -> bool:
    return bool(getattr(getattr(config, "triton", None), "cudagraphs", False))
