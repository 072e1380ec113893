"""The trial runs: forwards that look like training but train nothing. They count, trace, or set sizes.

`capd_client.steps.trial_runs` knows the same for a model that is already watched.
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
"""Classes of dispatch modes under which a forward is counted or traced."""

GRAPHING = ("make_graphed_callables", ("torch.cuda.graphs", "transformer_engine.pytorch.graph"))
"""The function that turns modules into CUDA graphs, and the files that define one. It runs the modules as a warm-up."""

# A forward with these tensors computes nothing.
_UNREAL = frozenset({"FakeTensor", "FunctionalTensor", "Proxy"})


def under_mode() -> bool:
    """Whether the computation of this thread is counted or traced."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(kind.__name__ in MODES for mode in modes for kind in type(mode).__mro__)


def makes_graph() -> bool:
    """Whether this thread is in a function that makes CUDA graphs."""
    name, homes = GRAPHING
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_globals.get("__name__") in homes:
            return True
        frame = frame.f_back
    return False


def uninitialized(module: nn.Module) -> bool:
    """Whether the module's next forward sets the shapes of its lazy parameters."""
    return any(is_lazy(parameter) for parameter in module.parameters())


def is_unreal(values: tuple[Any, ...]) -> bool:
    """Whether any of the values is a tensor without elements. Such a forward is traced, or learns shapes."""
    return any(
        type(value).__name__ in _UNREAL or (isinstance(value, torch.Tensor) and value.is_meta)
        for value in values
    )


def during_forward(module: nn.Module, context: AbstractContextManager[None]) -> None:
    """Hold `context` until the module's coming forward is over or has raised."""
    context.__enter__()

    def over(*_: Any) -> None:
        handle.remove()
        context.__exit__(None, None, None)

    handle = module.register_forward_hook(over, always_call=True)
