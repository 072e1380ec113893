"""Owners inside compiled graphs: a stack that exists while one graph is traced.

Dynamo puts calls of the `trace_*` functions into its graph unchanged. They run, in order, whenever the graph is traced.
A module's hooks put its taps on the stack, and functions that its forward calls find them there.

Hooks run uncompiled if their module is itself compiled, or if a graph ends in its forward. The operators then find the
owner at run time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from capd_client.graph.operators import in_graphs
from capd_client.graph.taps import graph_aliases, trace_call
from capd_client.process.log import RateLimitedLog

__all__ = ["prepare", "trace_begin", "trace_end", "trace_enter", "trace_leave", "trace_unseen"]

_notices = RateLimitedLog()


class _Known(NamedTuple):
    """A tap inside a graph: its number, as an input of the graph, and the gradients that it wants, as bits."""

    number: Tensor
    gradients: int


_Frame = dict[str, _Known]
_frames: list[_Frame] = []
# The trace of the frames.
_of: Any = None


def prepare() -> None:
    """Make Dynamo put the functions below into its graphs unchanged."""
    for function in (trace_enter, trace_leave, trace_begin, trace_end, trace_unseen):
        in_graphs(function)


def _stack() -> list[_Frame]:
    """Return the frames of the current trace. Frames of an aborted trace are removed."""
    global _of
    context = torch._guards.TracingContext.try_get()
    if context is not _of:
        _of = context
        _frames.clear()
    return _frames


def trace_enter(taps: tuple[tuple[str, Optional[Tensor], int], ...]) -> None:
    """Begin the forward of an owner. `taps`: the role, the number and the gradients of each of its taps."""
    _stack().append({role: _Known(number, wanted) for role, number, wanted in taps if number is not None})


def trace_leave() -> None:
    """End the forward of an owner."""
    stack = _stack()
    if stack:
        stack.pop()


def trace_begin(role: str, asked: Optional[Tensor], gradients: int, *operands: Any) -> tuple[Any, ...]:
    """Begin a call of a patched function.

    Args:
        role: The role of the function's taps.
        asked: The number that finds the owner at run time, if the trace does not know it; None: nothing finds it.
        gradients: The gradients that any owner may want, as bits.
        operands: The operands of the call.

    Returns:
        The operands for the call. Operands whose gradients are wanted are replaced by views.
    """
    stack = _stack()
    known = stack[-1].get(role) if stack else None if asked is None else _Known(asked, gradients)
    stack.append({} if known is None else {_CALL: known})
    return operands if known is None else graph_aliases(known.gradients, operands)


def trace_end(*tensors: Optional[Tensor]) -> None:
    """End the call. `tensors`: as for `trace_call`."""
    stack = _stack()
    known = stack.pop().get(_CALL) if stack else None
    if known is not None:
        trace_call(known.number, known.gradients, *tensors)


def trace_unseen(role: str, message: str) -> None:
    """Report once that a product runs inside graphs unseen. If its owner is known and has no tap, report nothing.

    Args:
        role: The role of the product's taps.
        message: The warning.
    """
    stack = _stack()
    if not stack or role in stack[-1]:
        _notices.warn(role, message)


# The role under which a call keeps its own tap. A function inside the call finds no tap.
_CALL = ""
