"""`capture()` inside compiled graphs: an operator replaces the call and breaks no graph.

The names and numbers of the call are constants of the graph, unless the compiler makes a number an input. Calls whose
names differ too often are skipped and counted (`capd_client.explicit.recompiles`). Metadata and attributes break the
graph if the compiler does not know them as constants. The call then runs eagerly after the break.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Optional, TypeVar

import msgspec
import torch

from capd_client.explicit.recompiles import crowded, note
from capd_client.graph.operators import (
    Operator,
    exporting,
    flags_of,
    in_graphs,
    is_final_trace,
    obstacle,
    restored,
    usable,
)
from capd_client.process.dynamo import untraced
from capd_client.protocol.counter_page import DropReason
from capd_client.session.current import session
from capd_client.steps.checkpointing import in_backward, repeating
from capd_client.tensors.inspect import local_part
from capd_client.tensors.placements import placements_of

__all__ = ["bind", "capture_in_graph"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_capture: Optional[Callable[..., None]] = None
# The default of each argument that the operator takes.
_defaults: dict[str, Any] = {}


def bind(capture: Callable[..., None]) -> None:
    """Set the function that the operator calls at run time: `capture`. Its module imports this one, so it is passed."""
    global _capture, _defaults
    _capture = capture
    parameters = inspect.signature(capture).parameters.values()
    _defaults = {one.name: one.default for one in parameters if one.name not in ("tensor", "immutable")}


@untraced
def _take(tensor: Any, **arguments: Any) -> None:
    if _capture is not None:
        _capture(tensor, **arguments)


def _at_trace_time(function: _Function) -> _Function:
    """Make the compiler run `function` once, with constants, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def capture_in_graph(tensor: Any, **given: Any) -> None:
    """Capture one tensor inside a graph. The compiler traces this in place of `capd_client.capture`.

    The arguments are the same. `immutable` has no effect, because the graph may reuse the tensor's memory.
    """
    way = _way(tuple(given))
    if way == "off":
        return
    if way == "outside":
        _take(tensor, **given)
        return
    if not isinstance(tensor, torch.Tensor):
        _refuse("in a compiled graph: the captured value is not a torch tensor")
        return
    if way == "left out":
        trace_left_out(tensor)
        return
    if given.get("metadata") is not None:
        given["metadata"] = _as_json(given["metadata"])
    if given.get("attributes") is not None:
        given["attributes"] = _as_json(given["attributes"])
    trace_capture(tensor, **given)


@_at_trace_time
def _way(names: tuple[str, ...]) -> str:
    """Return how the graph treats a call with arguments of these names.

    "off": the call disappears. "operator": an operator captures. "left out": an operator counts the missing capture.
    "outside": the call breaks the graph and runs eagerly. If its arguments are wrong, it then raises.
    """
    if "tensor_name" not in names or not {*_defaults, "immutable"}.issuperset(names):
        return "outside"
    if session() is None:
        return "off"
    if not usable():
        return "outside"
    in_graphs(trace_capture)
    in_graphs(trace_left_out)
    # It reads the compiler's private counters, which may change in another version.
    with suppress(Exception):
        if crowded():
            return "left out"
    return "operator"


@_at_trace_time
def _as_json(mapping: Any) -> str:
    try:
        return msgspec.json.encode(mapping).decode()
    except Exception as error:
        # The text is no mapping, so the capture is refused at run time.
        return msgspec.json.encode(str(error)).decode()


@_at_trace_time
def _refuse(problem: str, reason: DropReason = DropReason.INVALID_KEY) -> None:
    current = session()
    if current is not None:
        current.drop_invalid(problem, reason)


def trace_capture(tensor: torch.Tensor, **given: Any) -> None:
    """Put one capture into the graph."""
    if exporting():
        return
    try:
        problem = obstacle()
        if problem:
            # The graph cannot count drops at run time, so each graph counts once when it is traced.
            if is_final_trace():
                _refuse(f"in a compiled graph: {problem}", DropReason.UNSUPPORTED)
            return
        arguments = tuple(given.get(name, default) for name, default in _defaults.items())
        note(arguments)
        _CAPTURE(local_part(tensor), flags_of(tensor), placements_of(tensor), *arguments)
    except Exception as error:
        _refuse(f"in a compiled graph: {error}")


def trace_left_out(tensor: torch.Tensor) -> None:
    """Put an operator into the graph that counts a missing capture."""
    try:
        if not exporting() and not obstacle():
            _LEFT_OUT(local_part(tensor))
    except Exception as error:
        _refuse(f"in a compiled graph: {error}")


def _left_out(_: torch.Tensor) -> None:
    current = session()
    if current is not None and not (in_backward() and repeating()):
        current.drop_invalid(_CROWDED, DropReason.UNSUPPORTED)


def _captured(tensor: torch.Tensor, flags: int, placements: str, *arguments: Any) -> None:
    """Capture at run time, as the operator's body."""
    named = dict(zip(_defaults, arguments, strict=True))
    for name in ("metadata", "attributes"):
        if named[name] is not None:
            named[name] = msgspec.json.decode(named[name])
    _take(restored(tensor, flags, placements), **named)


_CROWDED = (
    "its function was compiled too often: its captures had other names or numbers each time. Compile the blocks "
    "together, give their captures the same names, or set torch._dynamo.config.recompile_limit to four times the "
    "number of blocks. For numbers of modules, torch._dynamo.config.allow_unspec_int_on_nn_module = True helps, too"
)

# The names follow the order of `capture`'s arguments.
_CAPTURE = Operator(
    "capture(Tensor tensor, int flags, str placements, str tensor_name, str layer_type, str component, "
    "str operation, str phase, SymInt? layer, str module, str stack, str? quant_type, str? metadata, "
    "str? attributes, str? slice, "
    "SymInt? iteration, SymInt? micro_batch, SymInt? sample_idx, SymInt? batch_idx, SymInt? sequence_idx) -> ()",
    _captured,
    lambda *_: None,
)

_LEFT_OUT = Operator("left_out(Tensor tensor) -> ()", _left_out, lambda _: None)
