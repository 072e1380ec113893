"""`capture()` inside compiled graphs: an operator replaces the call and breaks no graph.

The names and numbers of the call are constants of the graph, unless the compiler makes a number an input. Calls whose
names differ too often are skipped and counted (`capd_client.explicit.recompiles`). Metadata breaks the graph if the
compiler does not know it as constant. The call then runs eagerly after the break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def bind(capture: Callable[..., None]) -> None:
    """Set the function that the operator calls at run time: `capture`. Its module imports this one, so it is passed."""
    global _capture
    _capture = capture


@untraced
def _take(tensor: Any, **arguments: Any) -> None:
    if _capture is not None:
        _capture(tensor, **arguments)


def _at_trace_time(function: _Function) -> _Function:
    """Make the compiler run `function` once, with constants, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def capture_in_graph(
    tensor: Any,
    *,
    tensor_name: str,
    layer_type: str = "",
    component: str = "",
    operation: str = "forward",
    phase: str = "pre",
    layer: Optional[int] = None,
    module: str = "",
    stack: str = "",
    quant_type: Optional[str] = None,
    metadata: Optional[Mapping[str, Any]] = None,
    slice: Optional[str] = None,  # noqa: A002 - as in `capture`
    iteration: Optional[int] = None,
    micro_batch: Optional[int] = None,
    sample_idx: Optional[int] = None,
    batch_idx: Optional[int] = None,
    sequence_idx: Optional[int] = None,
    immutable: bool = False,
) -> None:
    """Capture one tensor inside a graph. The compiler traces this in place of `capd_client.capture`.

    The arguments are the same. `immutable` has no effect, because the graph may reuse the tensor's memory.
    """
    way = _way()
    if way == "off":
        return
    if way == "outside":
        _take(
            tensor, tensor_name=tensor_name, layer_type=layer_type, component=component, operation=operation,
            phase=phase, layer=layer, module=module, stack=stack, quant_type=quant_type, metadata=metadata,
            slice=slice, iteration=iteration, micro_batch=micro_batch, sample_idx=sample_idx,
            batch_idx=batch_idx, sequence_idx=sequence_idx, immutable=immutable,
        )  # fmt: skip
        return
    if not isinstance(tensor, torch.Tensor):
        _refuse("in a compiled graph: the captured value is not a torch tensor")
        return
    if way == "left out":
        trace_left_out(tensor)
        return
    text = None if metadata is None else _as_json(metadata)
    trace_capture(
        tensor, tensor_name, layer_type, component, operation, phase, layer, module, stack, quant_type, text,
        slice, iteration, micro_batch, sample_idx, batch_idx, sequence_idx,
    )  # fmt: skip


@_at_trace_time
def _way() -> str:
    """Return how the graph treats the call.

    "off": the call disappears. "operator": an operator captures. "left out": an operator counts the missing capture.
    "outside": the call breaks the graph and runs eagerly.
    """
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
def _as_json(metadata: Any) -> str:
    try:
        return msgspec.json.encode(metadata).decode()
    except Exception as error:
        # The text is no mapping, so the capture is refused at run time.
        return msgspec.json.encode(str(error)).decode()


@_at_trace_time
def _refuse(problem: str, reason: DropReason = DropReason.INVALID_KEY) -> None:
    current = session()
    if current is not None:
        current.drop_invalid(problem, reason)


def trace_capture(tensor: torch.Tensor, *arguments: Any) -> None:
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
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    if named["metadata"] is not None:
        named["metadata"] = msgspec.json.decode(named["metadata"])
    _take(restored(tensor, flags, placements), **named)


_CROWDED = (
    "its function was compiled too often: its captures had other names or numbers each time. Compile the blocks "
    "together, give their captures the same names, or set torch._dynamo.config.recompile_limit to four times the "
    "number of blocks. For numbers of modules, torch._dynamo.config.allow_unspec_int_on_nn_module = True helps, too"
)

_ARGUMENTS = (
    "tensor_name", "layer_type", "component", "operation", "phase", "layer", "module", "stack", "quant_type",
    "metadata", "slice", "iteration", "micro_batch", "sample_idx", "batch_idx", "sequence_idx",
)  # fmt: skip

_CAPTURE = Operator(
    "capture(Tensor tensor, int flags, str placements, str tensor_name, str layer_type, str component, "
    "str operation, str phase, SymInt? layer, str module, str stack, str? quant_type, str? metadata, str? slice, "
    "SymInt? iteration, SymInt? micro_batch, SymInt? sample_idx, SymInt? batch_idx, SymInt? sequence_idx) -> ()",
    _captured,
    lambda *_: None,
)

_LEFT_OUT = Operator("left_out(Tensor tensor) -> ()", _left_out, lambda _: None)
