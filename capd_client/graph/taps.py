"""Taps inside compiled graphs: what the hooks put there, and what runs whenever the graph comes by.

Graphs hold no objects: a tap is a number, and the number an input of the graph, so that equal blocks share one graph as
they do unwatched. Whether a step is captured is asked when the graph runs, so no step compiles anything again, and a
graph that outlives its watch finds nobody under its numbers and does nothing.

The forward's operator returns the moment of its call as a small tensor, which autograd keeps for the backward. So a
gradient belongs to its own forward, in whatever order backwards come.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol

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
from capd_client.process.log import Notices
from capd_client.protocol.key import Moment
from capd_client.protocol.kinds import Kind
from capd_client.tensors.autograd import autocast_dtype, hang, product_of
from capd_client.tensors.inspect import local_part, without_modes
from capd_client.tensors.placements import mark, placements_of
from capd_client.tensors.subclasses import is_taken_apart

__all__ = [
    "GRAD_OUTPUT", "FindsTap", "GraphCall", "GraphRoot", "GraphTap", "claim", "gradients_of", "graph_aliases",
    "graph_input", "refused", "release", "trace_call", "trace_root", "trace_root_end",
]  # fmt: skip

GRAD_OUTPUT = 1
"""The bit of dY in `gradients_of`; the operands follow, in their order, and the parameter."""

_FIELDS = ("iteration", "micro_batch", "call", "sample_idx", "batch_idx", "sequence_idx", "attempt")
_NOT_CAPTURED = (-1,) * (3 + len(_FIELDS))
"""Stands for the numbers of a call's tap and of the hook on its parameter, for its rules and for its moment."""

_notices = Notices()
_targets: dict[int, Callable[[], Any]] = {}  # number → weak reference to a tap or a root hook
_numbers = itertools.count()
_refused = False


class GraphCall(Protocol):
    """A captured call that runs inside a compiled graph.

    rules: the rules that captured it, as bits. hook_number: of the hook on its parameter, -1 without one.
    """

    @property
    def moment(self) -> Moment: ...
    @property
    def rules(self) -> int: ...
    @property
    def hook_number(self) -> int: ...


class GraphTap(Protocol):
    """A tap as compiled graphs use it.

    number: what graphs know it by. closed: whether the current iteration is known not to be captured.
    """

    @property
    def number(self) -> int: ...
    @property
    def closed(self) -> bool: ...

    def graph_call(
        self, tensors: Sequence[Any], autocast: Optional[torch.dtype], *, made: bool
    ) -> Optional[GraphCall]:
        """Capture one call; returns it if it is a captured one."""

    def graph_gradient(
        self, place: Optional[int], gradient: Tensor, moment: Moment, rules: int, hook: int
    ) -> None:
        """Capture a gradient of a call. hook: the number of the hook on its parameter."""

    def failed(self, where: str, error: Exception) -> None:
        """Count an error inside capd."""


class FindsTap(Protocol):
    """A number's owner: a tap, or a function that belongs to a tap while it runs."""

    def current(self) -> Optional[GraphTap]:
        """The tap to capture with now, if any."""


class GraphRoot(Protocol):
    """The watched model as compiled graphs use it."""

    def begin(self, with_gradients: bool) -> None:
        """A forward of the model starts."""

    def end(self) -> None:
        """The forward ends."""


def claim(target: object) -> int:
    """The number under which graphs know `target`; -1 where this torch cannot capture inside graphs."""
    if not usable():
        return -1
    in_graphs(trace_call)
    in_graphs(trace_root)
    in_graphs(trace_root_end)
    number = next(_numbers)
    _targets[number] = weakref.ref(target, lambda _: release(number))
    return number


def graph_input(number: int) -> Optional[Tensor]:
    """`number` as graphs take it in; None where this torch cannot capture inside graphs.

    A plain number would be a constant of the graph, and every block of a model would be compiled for itself.
    """
    if number < 0:
        return None
    with without_modes(), torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def gradients_of(kind: Kind, tensors: frozenset[str]) -> int:
    """Which gradients get hooks in the graph if these tensors are captured: GRAD_OUTPUT, and a bit for each other."""
    wanted = GRAD_OUTPUT * (not tensors.isdisjoint(("grad_output", f"grad_{kind.parameter}")))
    for place, name in enumerate((*kind.operands, kind.parameter)):
        wanted |= _bit(place) * (f"grad_{name}" in tensors)
    return wanted


def _bit(place: int) -> int:
    return GRAD_OUTPUT << 1 + place


def graph_aliases(wanted: int, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """At trace time: operands with those of `wanted` as views that have a gradient of their own."""
    return tuple(
        operand.view_as(operand) if wanted & _bit(place) and _has_gradient(operand) else operand
        for place, operand in enumerate(operands)
    )


def _has_gradient(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.requires_grad and torch.is_grad_enabled()


def release(number: int) -> None:
    """Make what graphs hold for `number` inert for good."""
    _targets.pop(number, None)


def refused() -> bool:
    """Whether a graph of this process was compiled without taps that it should have, which was said."""
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
    try:
        if _takes_operators():
            _BEGIN(number, with_gradients)
    except Exception as error:
        _not_in_graph("the root", error)


def trace_root_end(number: Tensor) -> None:
    """Put the end of a root's forward into the graph. Only that of an evaluation needs it."""
    try:
        if _takes_operators():
            _END(number)
    except Exception as error:
        _not_in_graph("the root", error)


def trace_call(number: Tensor, gradients: int, *tensors: Optional[Tensor]) -> None:
    """Put one call of a tapped product into the graph, with hooks on its `gradients`.

    tensors: the operands (aliases of those whose gradients are wanted), the parameter or None, and the output.
    """
    try:
        if _takes_operators():
            _trace_call(number, gradients, *tensors)
    except Exception as error:
        _not_in_graph("a product", error)


def _takes_operators() -> bool:
    if exporting():
        return False
    problem = obstacle()
    if problem:
        _refuse("obstacle", "nothing is captured of a compiled graph: %s", problem)
    return not problem


def _trace_call(number: Tensor, gradients: int, *tensors: Any) -> None:
    *operands, parameter, output = tensors
    if parameter is not None and is_taken_apart(parameter):
        parameter = None  # no operator takes it; the tap knows the module that has it
    if torch._C._functorch.is_batchedtensor(output):
        _refuse("vmap", "inside vmap nothing is captured in compiled graphs")
        return
    autocast = autocast_dtype(operands[0].device.type)
    tensors = (*operands, parameter, output)
    placements = [placements_of(t) for t in tensors]
    local = [local_part(t) for t in tensors]
    made = parameter is not None and is_made_in_graph(parameter)  # then its gradient stays in the graph
    flags = flags_of(*tensors) | made << 2 * len(tensors)
    moment = _TAP(local, number, flags, autocast, placements if any(placements) else [])
    if not torch.is_grad_enabled():
        return
    if torch._dynamo.config.compiled_autograd:
        _notices.warn(
            "compiled_autograd", "under compiled autograd the gradients of compiled graphs are not captured"
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
    root: Optional[GraphRoot] = _target(int(number))
    if root is not None:
        root.begin(with_gradients)


def _end(number: Tensor) -> None:
    root: Optional[GraphRoot] = _target(int(number))
    if root is not None:
        root.end()


def _tap(
    tensors: list[Any],
    number: Tensor,
    flags: int,
    autocast: Optional[torch.dtype],
    placements: list[str],
) -> Tensor:
    target: Optional[FindsTap] = _target(int(number))
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
    numbers = [-1 if (value := getattr(call.moment, name)) is None else value for name in _FIELDS]
    return torch.tensor([tap.number, call.hook_number, call.rules, *numbers], dtype=torch.int64, device="cpu")


def _gradient(gradient: Tensor, moment: Tensor, which: int, placements: str) -> None:
    number, hook, rules, *values = moment.tolist()
    tap: Optional[GraphTap] = _target(number)
    if tap is None:
        return
    try:
        given: dict[str, Any] = {n: v for n, v in zip(_FIELDS, values, strict=True) if v >= 0}
        tap.graph_gradient(_place_of(which), mark(gradient, placements), Moment(**given), rules, hook)
    except Exception as error:
        tap.failed("compiled gradient hook", error)


def _place_of(which: int) -> Optional[int]:
    """The operand whose gradient it is; after the last operand comes the parameter; None for dY."""
    return None if which == GRAD_OUTPUT else which.bit_length() - 2


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
