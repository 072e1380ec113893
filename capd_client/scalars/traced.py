"""`scalar()` inside compiled graphs: an operator replaces the call and breaks no graph.

The name is a constant of the graph. A number becomes a tensor first. Where torch knows no effects, the call breaks the
graph and runs eagerly.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from capd_client.graph.operators import Operator, exporting, in_graphs, is_final_trace, obstacle, usable
from capd_client.protocol.counter_page import DropReason
from capd_client.scalars import eager
from capd_client.session.current import session
from capd_client.tensors.inspect import local_part, without_single_value

__all__ = ["scalar_in_graph"]

# A graph has integers of 64 bits.
_INTEGERS = 1 << 63


def scalar_in_graph(name: Any, value: Any, **given: Any) -> None:
    """Record one number inside a graph. The compiler traces this in place of `capd_client.scalar`.

    The arguments are the same.
    """
    treatment = _treatment(tuple(given))
    if treatment == "off":
        return
    if treatment == "outside":
        eager.scalar(name, value, **given)
        return
    number: Optional[torch.Tensor] = None
    if isinstance(value, torch.Tensor):
        number = value
    # A number of NumPy is an array for the compiler.
    elif hasattr(value, "dtype"):
        number = torch.as_tensor(value)
    elif isinstance(value, float) or (isinstance(value, int) and -_INTEGERS <= value < _INTEGERS):
        number = torch.full((), value, dtype=torch.float64)
    trace_scalar(
        number, name if isinstance(name, str) else "", given.get("iteration"), given.get("micro_batch")
    )


def _treatment(names: tuple[str, ...]) -> str:
    """Return how the graph treats a call: "off", "operator", or "outside" for a call that breaks the graph.

    The compiler runs this function once, with constants, as `torch.compiler.assume_constant_result` does.
    """
    if not {"iteration", "micro_batch"}.issuperset(names):
        return "outside"
    if session() is None:
        return "off"
    if not usable():
        return "outside"
    in_graphs(trace_scalar)
    return "operator"


_treatment._dynamo_marked_constant = True  # type: ignore[attr-defined]


def trace_scalar(value: Optional[torch.Tensor], name: str, iteration: Any, micro_batch: Any) -> None:
    """Put one scalar into the graph. One without a value or a name is a drop, which each graph counts once."""
    if exporting():
        return
    current = session()
    try:
        problem = obstacle() if name and value is not None else "its value is no number, or its name no str"
        problem = problem or without_single_value(value)
        if not problem:
            _SCALAR(local_part(value), name, iteration, micro_batch)
        elif current is not None and is_final_trace():
            # The graph cannot count drops at run time.
            current.drop_invalid(f"scalar in a compiled graph: {problem}", DropReason.UNSUPPORTED)
    except Exception as error:
        if current is not None:
            current.drop_invalid(f"scalar in a compiled graph: {error}")


def _run(value: torch.Tensor, name: str, iteration: Any, micro_batch: Any) -> None:
    eager.scalar(name, value, iteration=iteration, micro_batch=micro_batch)


_SCALAR = Operator(
    "scalar(Tensor value, str name, SymInt? iteration, SymInt? micro_batch) -> ()", _run, lambda *_: None
)
