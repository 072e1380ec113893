"""Forwards that train nothing though they look like training: what they compute is counted, or traced, or sets sizes.

`capd_client.steps.trial_runs` knows the same of a model that is watched already.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["GRAPHING", "MODES", "during_forward", "is_unreal", "makes_graph", "under_mode", "uninitialized"]

MODES = frozenset(
    {
        "FlopCounterMode",
        "_FlopCounterMode",
        "FakeTensorMode",
        "FunctionalTensorMode",
        "ProxyTorchDispatchMode",
    }
)
"""Classes of dispatch modes under which a forward is run to be counted or traced."""

GRAPHING = ("make_graphed_callables", ("torch.cuda.graphs", "transformer_engine.pytorch.graph"))
"""The function that makes modules into CUDA graphs, and the modules that have one: it runs them to warm them up."""

_UNREAL = frozenset({"FakeTensor", "FunctionalTensor", "Proxy"})  # a forward with these computes nothing


def under_mode() -> bool:
    """Whether what this thread computes is counted or traced."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(kind.__name__ in MODES for mode in modes for kind in type(mode).__mro__)


def makes_graph() -> bool:
    """Whether this thread is in such a function."""
    name, homes = GRAPHING
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_globals.get("__name__") in homes:
            return True
        frame = frame.f_back
    return False


def uninitialized(module: nn.Module) -> bool:
    """Whether a forward of the module is the one that gives its lazy parameters their shapes."""
    return any(is_lazy(parameter) for parameter in module.parameters())


def is_unreal(values: tuple[Any, ...]) -> bool:
    """Whether any of them has no elements: such a forward is traced, or learns shapes."""
    return any(
        type(value).__name__ in _UNREAL or (isinstance(value, torch.Tensor) and value.is_meta)
        for value in values
    )


def during_forward(module: nn.Module, context: AbstractContextManager[None]) -> None:
    """Hold `context` until the forward of the module that is about to run is over, or has raised."""
    context.__enter__()

    def over(*_: Any) -> None:
        handle.remove()
        context.__exit__(None, None, None)

    handle = module.register_forward_hook(over, always_call=True)
