"""Keeps torch.compile out of capd's own code, without importing the compiler into jobs that do not use it.

Otherwise Dynamo would trace locks, clocks and counters into the job's graphs, or fail on them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["traced_as", "untraced", "untraced_methods"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def untraced(function: _Function) -> _Function:
    """Mark a plain function, as `torch.compiler.disable` does: a compiled caller breaks its graph and calls it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return _never_compiled(function)


def untraced_methods(kind: _Class) -> _Class:
    """Mark every method of a class as `untraced` does, also the functions of its properties."""
    for value in vars(kind).values():
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(function, FunctionType):
                untraced(function)
    return kind


def traced_as(
    stand_in: Callable[..., Any], *, calls_the_job: bool = False
) -> Callable[[_Function], _Function]:
    """Mark a plain function: a compiled caller traces `stand_in` instead, all other callers run the function.

    `torch.compile` marks its own wrappers in this way. The mark costs nothing outside a trace.

    Args:
        stand_in: The function that is traced.
        calls_the_job: Whether the marked function calls functions of the job. They are then compiled as usual.
    """

    def mark(function: _Function) -> _Function:
        function._torchdynamo_inline = stand_in  # type: ignore[attr-defined]
        return _never_compiled(function, calls_the_job=calls_the_job)

    return mark


def _never_compiled(function: _Function, *, calls_the_job: bool = False) -> _Function:
    """Keep its frames, and those it calls, from being compiled alone, as would happen after a graph break."""
    try:
        from torch._C._dynamo.eval_frame import (  # type: ignore[attr-defined, unused-ignore]
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    # An older torch treats our frames by its own rules.
    except ImportError:
        return function
    others = _FrameAction.DEFAULT if calls_the_job else _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, others))
    return function
