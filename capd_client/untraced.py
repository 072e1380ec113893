"""Keeps torch.compile out of capd's own code: a compiled caller breaks its graph and calls it as it is.

Without this, Dynamo would trace locks, clocks and counters into the job's graphs, or fail on them. It is what
`torch.compiler.disable` does, without importing the compiler into jobs that do not use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["untraced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Mark a plain function: neither it nor anything it calls is traced."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo.eval_frame import (  # type: ignore[attr-defined, unused-ignore]
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # an older torch: its callers break the graph, our frames are left to its own rules
        return function
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
