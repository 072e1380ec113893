"""Taps inside compiled graphs: what the hooks put there, and what runs whenever the graph comes by.

Graphs hold numbers and no objects: whether a step is captured is asked when the graph runs, so no step compiles
anything anew, and a graph that outlives its watch finds nobody under its numbers and does nothing.

The forward's operator returns the moment of its call as a small tensor, which autograd keeps for the backward. So a
gradient belongs to its own forward, in whatever order backwards come.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from capd_client.graph_ops import Operator, exporting, flags_of, in_graphs, restored, usable
from capd_client.key import Moment
from capd_client.notices import Notices
from capd_client.products import autocast_dtype, hang, product_of
from capd_client.tensors import local_part

if TYPE_CHECKING:
    from capd_client.hook_objects import RootHook
    from capd_client.taps import LinearTap

__all__ = ["claim", "release", "trace_call", "trace_root"]

_GRADIENTS = ("grad_output", "grad_input")
_FIELDS = ("iteration", "micro_batch", "call", "sample_idx", "batch_idx", "sequence_idx", "attempt")

_notices = Notices()
_targets: dict[int, Callable[[], Any]] = {}  # number → weak reference to a tap or a root hook
_numbers = itertools.count()


def claim(target: object) -> int:
    """The number under which graphs know `target`; -1 where this torch cannot capture inside graphs."""
    if not usable():
        return -1
    in_graphs(trace_call)
    in_graphs(trace_root)
    number = next(_numbers)
    _targets[number] = weakref.ref(target, lambda _: release(number))
    return number


def release(number: int) -> None:
    """Make what graphs hold for `number` inert for good."""
    _targets.pop(number, None)


def _target(number: int) -> Any:
    found = _targets.get(number)
    return None if found is None else found()


# -- at trace time ----------------------------------------------------------------------------------------


def trace_root(number: int) -> None:
    """Put the beginning of a root's forward into the graph."""
    root: Optional[RootHook] = _target(number)
    if root is None or exporting():
        return
    try:
        _BEGIN(number)
    except Exception as error:
        root.failed("compiling", error)


def trace_call(number: int, x: Tensor, weight: Optional[Tensor], output: Tensor) -> None:
    """Put one call of a tapped module into the graph: its operands, its output, and hooks on its gradients."""
    tap: Optional[LinearTap] = _target(number)
    if tap is None or exporting():
        return
    try:
        _trace_call(tap, number, x, weight, output)
    except Exception as error:
        tap.failed("compiling", error)


def _trace_call(tap: LinearTap, number: int, x: Tensor, weight: Optional[Tensor], output: Tensor) -> None:
    if torch._C._functorch.is_batchedtensor(output):
        _notices.warn("vmap", "inside vmap nothing is captured of %s", tap.name)
        return
    operands = (x, weight, output)
    moment = _TAP(*map(local_part, operands), number, flags_of(*operands), autocast_dtype(x.device.type))
    if not torch.is_grad_enabled():
        return
    if torch._dynamo.config.compiled_autograd:
        _notices.warn(
            "compiled_autograd", "under compiled autograd the gradients of %s are not captured", tap.name
        )
    if "grad_input" in tap.tensors and x.requires_grad:  # x is the alias that the pre-hook made
        hang(x, _gradient_hook(tap, number, "grad_input", moment))
    if output.requires_grad and not tap.tensors.isdisjoint(("grad_output", "grad_weight")):
        product = product_of(output)
        shape = None if product is output else output.shape
        hang(product, _gradient_hook(tap, number, "grad_output", moment, shape))


def _gradient_hook(
    tap: LinearTap, number: int, name: str, moment: Tensor, shape: Optional[torch.Size] = None
) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        try:
            whole = gradient if shape is None else gradient.reshape(shape)
            _GRADIENT(local_part(whole), moment, number, _GRADIENTS.index(name))
        except Exception as error:
            tap.failed(f"compiling the {name} hook", error)

    return hook


# -- at run time, as operators ----------------------------------------------------------------------------


def _begin(number: int) -> None:
    root: Optional[RootHook] = _target(number)
    if root is not None:
        root.begin()


def _tap(
    x: Tensor,
    weight: Optional[Tensor],
    output: Tensor,
    number: int,
    flags: int,
    autocast: Optional[torch.dtype],
) -> Tensor:
    tap: Optional[LinearTap] = _target(number)
    moment = None
    if tap is not None and tap.gate.closed_at != tap.gate.context.iteration:
        try:
            x, weight, output = (restored(t, flags >> 2 * i) for i, t in enumerate((x, weight, output)))
            moment = tap.graph_call(x, weight, output, autocast)
        except Exception as error:
            tap.failed("compiled forward", error)
    if moment is None:
        return torch.full((len(_FIELDS),), -1, dtype=torch.int64, device="cpu")
    numbers = [-1 if (value := getattr(moment, name)) is None else value for name in _FIELDS]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _gradient(gradient: Tensor, moment: Tensor, number: int, which: int) -> None:
    tap: Optional[LinearTap] = _target(number)
    if tap is None:
        return
    try:
        values: list[int] = moment.tolist()
        if values[0] >= 0:
            given: dict[str, Any] = {n: v for n, v in zip(_FIELDS, values, strict=True) if v >= 0}
            tap.gradient(_GRADIENTS[which], gradient, Moment(**given))
    except Exception as error:
        tap.failed(f"compiled {_GRADIENTS[which]} hook", error)


_BEGIN = Operator("begin(int root) -> ()", _begin, lambda root: None)
_TAP = Operator(
    "tap(Tensor input, Tensor? weight, Tensor output, int tap, int flags, ScalarType? autocast) -> Tensor",
    _tap,
    lambda *_: torch.empty(len(_FIELDS), dtype=torch.int64, device="cpu"),
)
_GRADIENT = Operator(
    "gradient(Tensor gradient, Tensor moment, int tap, int which) -> ()", _gradient, lambda *_: None
)
