"""Owners inside compiled graphs: a stack that lives while one graph is traced.

Dynamo puts calls of the `trace_*` functions into its graph as they are; they run, in order, whenever the graph is
traced, so what a module's hooks left on the stack is found by the functions that are called in its forward. Hooks of a
module that is itself compiled, or has a graph end in its forward, run uncompiled: then operators find the owner.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from capd_client.graph.operators import in_graphs
from capd_client.graph.taps import graph_aliases, trace_call
from capd_client.process.log import Notices

__all__ = ["prepare", "trace_begin", "trace_end", "trace_enter", "trace_leave", "trace_unseen"]

_notices = Notices()


class _Known(NamedTuple):
    """A tap as graphs know it: its number, as an input of the graph, and the gradients that it wants."""

    number: Tensor
    gradients: int


_Frame = dict[str, _Known]
_frames: list[_Frame] = []
_of: Any = None  # the trace that the frames belong to


def prepare() -> None:
    """Make Dynamo put the functions below into its graphs."""
    for function in (trace_enter, trace_leave, trace_begin, trace_end, trace_unseen):
        in_graphs(function)


def _stack() -> list[_Frame]:
    """The frames of the trace under way; one that was broken off leaves none to the next."""
    global _of
    context = torch._guards.TracingContext.try_get()
    if context is not _of:
        _of = context
        _frames.clear()
    return _frames


def trace_enter(taps: tuple[tuple[str, Optional[Tensor], int], ...]) -> None:
    """The forward of an owner begins: role, number and gradients of each of its taps."""
    _stack().append({role: _Known(number, wanted) for role, number, wanted in taps if number is not None})


def trace_leave() -> None:
    """The forward of an owner ends."""
    stack = _stack()
    if stack:
        stack.pop()


def trace_begin(role: str, asked: Optional[Tensor], gradients: int, *operands: Any) -> tuple[Any, ...]:
    """A call of the function `role` begins: the operands to call it with.

    asked, gradients: the number of who knows the owner at run time, if somebody does, and what any owner may want.
    """
    stack = _stack()
    known = stack[-1].get(role) if stack else None if asked is None else _Known(asked, gradients)
    stack.append({} if known is None else {_CALL: known})
    return operands if known is None else graph_aliases(known.gradients, operands)


def trace_end(*tensors: Optional[Tensor]) -> None:
    """The call has run: what `trace_call` takes."""
    stack = _stack()
    known = stack.pop().get(_CALL) if stack else None
    if known is not None:
        trace_call(known.number, known.gradients, *tensors)


def trace_unseen(role: str, message: str) -> None:
    """A product runs that graphs do not show: say so, once, unless the owner wants nothing of it."""
    stack = _stack()
    if not stack or role in stack[-1]:
        _notices.warn(role, message)


_CALL = ""  # the role under which a call keeps its own tap; inside it no function finds one
