"""Taps inside compiled graphs: the hooks put operators into the graph, and each run of the graph calls them.

A graph holds no objects. It takes the number of a tap as an input, so equal blocks share one graph, as without a watch.
The operators ask at run time whether a step is captured, so no step compiles a graph again. A graph that outlives its
watch finds no tap for its numbers and does nothing.

The forward's operator returns the moment of its call as a small tensor. Autograd keeps it for the backward. So a
gradient belongs to its own forward, in any order of backwards.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from capd_client.graph.operators import (
    Operator,
    exporting,
    flags_of,
    in_graphs,
    is_made_in_graph,
    obstacle,
    restored,
    usable,
)
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.key import ORDINALS, Moment
from capd_client.protocol.kinds import Kind
from capd_client.tensors.autograd import autocast_dtype, hang, product_of
from capd_client.tensors.inspect import local_part, without_modes
from capd_client.tensors.placements import mark, placements_of
from capd_client.tensors.subclasses import is_taken_apart

__all__ = [
    "GRAD_OUTPUT", "claim", "gradients_of", "graph_aliases",
    "graph_input", "refused", "release", "trace_call", "trace_root", "trace_root_end",
]  # fmt: skip

GRAD_OUTPUT = 1
"""The bit of dY in `gradients_of`. The next bits are the operands, in order, and the parameter."""

_NOT_CAPTURED = (-1,) * (3 + len(ORDINALS))
"""The moment tensor of a call that is not captured: no tap, no hook on the parameter, no rules, no moment."""

_notices = RateLimitedLog()
# number → weak reference to a tap, a function or a root hook.
_targets: dict[int, Callable[[], Any]] = {}
_numbers = itertools.count()
_refused = False


def claim(target: object) -> int:
    """Return a new number for `target` in graphs; -1 if this torch cannot capture inside graphs.

    Args:
        target: A tap (`capd_client.hooks.tap.Tap`) or a patched function (`FunctionSite` beside it), whose `current()`
            returns the tap that captures now, if any. Or the hook of a watched model (`RootHook` beside it).
    """
    if not usable():
        return -1
    in_graphs(trace_call)
    in_graphs(trace_root)
    in_graphs(trace_root_end)
    number = next(_numbers)
    _targets[number] = weakref.ref(target, lambda _: release(number))
    return number


def graph_input(number: int) -> Optional[Tensor]:
    """Return `number` as an input of graphs; None if this torch cannot capture inside graphs.

    A plain number would be a constant of the graph, and every block of a model would be compiled separately.
    """
    if number < 0:
        return None
    with without_modes(), torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def gradients_of(kind: Kind, tensors: frozenset[str]) -> int:
    """Return the gradients that get hooks in the graph if these tensors are captured, as bits; see GRAD_OUTPUT."""
    wanted = GRAD_OUTPUT * (not tensors.isdisjoint(("grad_output", f"grad_{kind.parameter}")))
    for place, name in enumerate((*kind.operands, kind.parameter)):
        wanted |= _bit(place) * (f"grad_{name}" in tensors)
    return wanted


def _bit(place: int) -> int:
    return GRAD_OUTPUT << 1 + place


def graph_aliases(wanted: int, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace operands by views with their own gradients, at trace time. `wanted`: their bits."""
    if not torch.is_grad_enabled():
        return operands
    return tuple(
        operand.view_as(operand)
        if wanted & _bit(place) and isinstance(operand, Tensor) and operand.requires_grad
        else operand
        for place, operand in enumerate(operands)
    )


def release(number: int) -> None:
    """Make the operators with this number permanently inert."""
    _targets.pop(number, None)


def refused() -> bool:
    """Return whether a graph of this process lacks taps that it should have. A warning has reported it."""
    return _refused


def _refuse(reason: str, message: str, *args: object) -> None:
    global _refused
    _refused = True
    _notices.warn(reason, message, *args)


def _target(number: int) -> Any:
    found = _targets.get(number)
    return None if found is None else found()


# -- at trace time ----------------------------------------------------------------------------------------


def trace_root(number: Tensor, with_gradients: bool) -> None:
    """Put the beginning of a root's forward into the graph."""
    _put("the root", _BEGIN, number, with_gradients)


def trace_root_end(number: Tensor) -> None:
    """Put the end of a root's forward into the graph. Only an evaluation needs it."""
    _put("the root", _END, number)


def trace_call(number: Tensor, gradients: int, *tensors: Optional[Tensor]) -> None:
    """Put one call of a tapped product into the graph.

    Args:
        number: The number of the tap.
        gradients: The gradients that get hooks, as bits.
        tensors: The operands, the parameter or None, and the output. Operands whose gradients are wanted are aliases.
    """
    _put("a product", _trace_call, number, gradients, *tensors)


def _put(what: str, operator: Callable[..., None], *args: Any) -> None:
    try:
        if _takes_operators():
            operator(*args)
    except Exception as error:
        _not_in_graph(what, error)


def _takes_operators() -> bool:
    if exporting():
        return False
    problem = obstacle()
    if problem:
        _refuse("obstacle", "nothing is captured of a compiled graph: %s", problem)
    return not problem


def _trace_call(number: Tensor, gradients: int, *tensors: Any) -> None:
    *operands, parameter, output = tensors
    # No operator accepts such a parameter. The tap finds it in its module instead.
    if parameter is not None and is_taken_apart(parameter):
        parameter = None
    if torch._C._functorch.is_batchedtensor(output):
        _refuse("vmap", "nothing is captured inside vmap in compiled graphs")
        return
    autocast = autocast_dtype(operands[0].device.type)
    tensors = (*operands, parameter, output)
    placements = [placements_of(t) for t in tensors]
    local = [local_part(t) for t in tensors]
    # The gradient of a computed parameter stays in the graph.
    made = parameter is not None and is_made_in_graph(parameter)
    flags = flags_of(*tensors) | made << 2 * len(tensors)
    moment = _TAP(local, number, flags, autocast, placements if any(placements) else [])
    if not torch.is_grad_enabled():
        return
    if torch._dynamo.config.compiled_autograd:
        _notices.warn(
            "compiled_autograd", "gradients of compiled graphs are not captured under compiled autograd"
        )
    for place, operand in enumerate(operands):
        if gradients & _bit(place) and operand is not None and operand.requires_grad:
            hang(operand, _gradient_hook(_bit(place), moment))
    if made and gradients & _bit(len(operands)):
        hang(parameter, _gradient_hook(_bit(len(operands)), moment))
    if gradients & GRAD_OUTPUT and output.requires_grad:
        product = product_of(output)
        shape = None if product is output else output.shape
        hang(product, _gradient_hook(GRAD_OUTPUT, moment, shape))


def _gradient_hook(
    which: int, moment: Tensor, shape: Optional[torch.Size] = None
) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        try:
            whole = gradient if shape is None else gradient.reshape(shape)
            _GRADIENT(local_part(whole), moment, which, placements_of(whole))
        except Exception as error:
            _not_in_graph("a gradient", error)

    return hook


def _not_in_graph(what: str, error: Exception) -> None:
    problem = f"{type(error).__name__}: {error}"
    _refuse("compiling", "%s is not captured in a compiled graph: %.1000s", what, problem)


# -- at run time, as operators ----------------------------------------------------------------------------


def _begin(number: Tensor, with_gradients: bool) -> None:
    root = _target(int(number))
    if root is not None:
        root.begin(with_gradients)


def _end(number: Tensor) -> None:
    root = _target(int(number))
    if root is not None:
        root.end()


def _tap(
    tensors: list[Any],
    number: Tensor,
    flags: int,
    autocast: Optional[torch.dtype],
    placements: list[str],
) -> Tensor:
    target = _target(int(number))
    tap = None if target is None else target.current()
    call = None
    if tap is not None and not tap.closed:
        try:
            noted = placements or [""] * len(tensors)
            whole = [restored(t, flags >> 2 * i, noted[i]) for i, t in enumerate(tensors)]
            call = tap.graph_call(whole, autocast, made=bool(flags >> 2 * len(tensors)))
        except Exception as error:
            tap.failed("compiled forward", error)
    if tap is None or call is None:
        return torch.tensor(_NOT_CAPTURED, dtype=torch.int64, device="cpu")
    numbers = [-1 if (value := getattr(call.moment, name)) is None else value for name in ORDINALS]
    return torch.tensor([tap.number, call.hook, call.rules, *numbers], dtype=torch.int64, device="cpu")


def _gradient(gradient: Tensor, moment: Tensor, which: int, placements: str) -> None:
    number, hook, rules, *values = moment.tolist()
    tap = _target(number)
    if tap is None:
        return
    try:
        given: dict[str, Any] = {n: v for n, v in zip(ORDINALS, values, strict=True) if v >= 0}
        # The parameter follows the last operand.
        place = None if which == GRAD_OUTPUT else which.bit_length() - 2
        tap.graph_gradient(place, mark(gradient, placements), Moment(**given), rules, hook)
    except Exception as error:
        tap.failed("compiled gradient hook", error)


_BEGIN = Operator("begin(Tensor root, bool with_gradients) -> ()", _begin, lambda *_: None)
_END = Operator("end(Tensor root) -> ()", _end, lambda _: None)
_TAP = Operator(
    "tap(Tensor?[] tensors, Tensor tap, int flags, ScalarType? autocast, str[] placements) -> Tensor",
    _tap,
    lambda *_: torch.empty(len(_NOT_CAPTURED), dtype=torch.int64, device="cpu"),
)
_GRADIENT = Operator(
    "gradient(Tensor gradient, Tensor moment, int which, str placements) -> ()", _gradient, lambda *_: None
)
