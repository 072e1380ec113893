"""Cuts Inductor's CUDA graphs at capd's operators, because a replay would not call their bodies.

Inductor cuts at operators with the tag `cudagraph_unsafe`. For an effect, it checks only the higher-order operator that
carries the effect through the graph. So capd adds its operators' names to Inductor's configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["cuts_at", "missing_cuts"]


def cuts_at(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake of the operator that also makes Inductor cut at the operator.

    Inductor's configuration belongs to one thread (torch 2.13), and to one call of torch.compile with options. A
    backward is compiled at its first run, on the thread that runs it. On the same thread, right before it decides to
    cut, Inductor calls the fake. So the fake changes the configuration.

    Args:
        name: The name of the operator.
        fake: The operator's own fake.
    """

    def asked(*args: Any, **kwargs: Any) -> Any:
        _cut_at(name)
        return fake(*args, **kwargs)

    return asked


def _cut_at(name: str) -> None:
    config = _config()
    # The setting is part of the keys of Inductor's caches. Without CUDA graphs the keys stay unchanged.
    if not _makes_cuda_graphs(config):
        return
    names = getattr(config, "custom_should_partition_ops", None)
    # The list is copied, because it may belong to the job.
    if names is not None and name not in names:
        config.custom_should_partition_ops = [*names, name]


def missing_cuts() -> str:
    """Return why operators of the graph that is being traced would be inside CUDA graphs; empty if they would not."""
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
    """Return Inductor's configuration, or None if Inductor is not imported.

    An import takes a second, and other backends do not need it.
    """
    return sys.modules.get("torch._inductor.config")


def _makes_cuda_graphs(config: Any) -> bool:
    return bool(getattr(getattr(config, "triton", None), "cudagraphs", False))
