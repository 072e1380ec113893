"""The callables that torch stores in a watched model: small, picklable, inert in copies, never raising.

Who moves them to another module (quantisation in place does) may call them without keyword arguments: they do nothing.
A deepcopy or an unpickled model carries `_inert` in their place: it computes the same and is not captured.
The first thing each of them asks is whether this step is captured; that is all they cost otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from capd_client import recompute
from capd_client.graph_taps import claim, gradients_of, graph_input, release, trace_call, trace_root
from capd_client.key import Moment
from capd_client.tensors import is_tracing
from capd_client.untraced import traced_as, untraced

if TYPE_CHECKING:
    from capd_client.stepping import Clock
    from capd_client.taps import LinearTap, Sink

__all__ = ["ForwardHook", "GradHook", "PreHook", "PreHookResult", "RootHook", "WeightHook", "with_input"]

PreHookResult = Optional[tuple[tuple[Any, ...], dict[str, Any]]]


def _inert(*_args: Any, **_kwargs: Any) -> None:
    """What a hook becomes in a copy of its model."""


def _make_inert() -> Callable[..., None]:
    return _inert


class _Hook:
    """Base of the hook objects: a deepcopy or a pickle of one does nothing."""

    __slots__ = ()
    __torch_unserializable__ = True  # saving a tensor that carries one warns otherwise

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_inert, ()


def with_input(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreHookResult:
    """The arguments of a module with `x` in the place of its input."""
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})


class PreHook(_Hook):
    """Forward pre-hook (with kwargs) of a tapped module."""

    __slots__ = ("_aliases_in_graph", "_gate", "_tap")

    def __init__(self, tap: LinearTap) -> None:
        self._tap = tap
        self._gate = tap.gate
        self._aliases_in_graph = tap.number >= 0 and "grad_input" in tap.tensors

    def in_graph(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Optional[dict[str, Any]] = None
    ) -> PreHookResult:
        """What is compiled in its place: only the alias of the input, if dX is wanted."""
        if not self._aliases_in_graph or not module.training or kwargs is None:
            return None
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or not x.requires_grad or not torch.is_grad_enabled():
            return None
        return with_input(x.view_as(x), args, kwargs)

    @traced_as(in_graph)
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Optional[dict[str, Any]] = None
    ) -> PreHookResult:
        gate = self._gate
        if gate.closed_at == gate.context.iteration or is_compiling() or kwargs is None:
            return None
        try:
            return self._tap.before_forward(module, args, kwargs)
        except Exception as error:
            self._tap.failed("forward pre-hook", error)
            return None


class ForwardHook(_Hook):
    """Forward hook (with kwargs) of a tapped module."""

    __slots__ = ("_gradients", "_number", "_tap")

    def __init__(self, tap: LinearTap) -> None:
        self._tap = tap
        self._number = graph_input(tap.number)
        self._gradients = gradients_of(tap.tensors)

    def in_graph(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        """What is compiled in its place: the whole of a call."""
        number = self._number
        if number is None or not module.training or not isinstance(output, Tensor):
            return
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            weight: Any = module.weight
            trace_call(number, self._gradients, x, weight, output)

    @traced_as(in_graph)
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        tap = self._tap
        if tap.bound is None:
            return
        try:
            tap.after_forward(output)
        except Exception as error:
            tap.failed("forward hook", error)


class GradHook(_Hook):
    """Tensor hook that carries the moment of a forward into its backward."""

    __slots__ = ("_moment", "_shape", "_tap", "_tensor_name")

    def __init__(
        self, tap: LinearTap, tensor_name: str, moment: Moment, shape: Optional[torch.Size] = None
    ) -> None:
        self._shape = shape
        self._tap = tap
        self._tensor_name = tensor_name
        self._moment = moment

    @untraced  # compiled autograd traces hooks
    def __call__(self, gradient: Tensor) -> None:
        try:
            self._tap.gradient(self._tensor_name, gradient, self._moment, self._shape)
        except Exception as error:
            self._tap.failed(f"{self._tensor_name} hook", error)


class WeightHook(_Hook):
    """Hook on a weight: one call per backward, before the gradient is accumulated."""

    __slots__ = ("_tap",)

    def __init__(self, tap: LinearTap) -> None:
        self._tap = tap

    @untraced  # compiled autograd traces hooks
    def __call__(self, gradient: Tensor) -> None:
        tap = self._tap
        if not tap.expects_weight_gradient:
            return
        try:
            tap.weight_gradient(gradient)
        except Exception as error:
            tap.failed("grad_weight hook", error)


class RootHook(_Hook):
    """Forward pre-hook of the watched model: every training forward begins a micro-batch."""

    __slots__ = ("__weakref__", "_clock", "_input", "_number", "_root", "_sink", "forwards")

    def __init__(self, root: nn.Module, clock: Clock, sink: Sink) -> None:
        self._root = weakref.ref(root)
        self._clock = clock
        self._sink = sink
        self.forwards = 0  # those that it has seen
        self._number = claim(self)
        self._input = graph_input(self._number)

    def in_graph(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """What is compiled in its place."""
        if self._input is not None and module.training:
            trace_root(self._input)

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and not is_compiling() and self._root() is module and not is_tracing():
            self.begin()

    def begin(self) -> None:
        """A training forward of the root starts."""
        try:
            if not recompute.in_backward():
                self.forwards += 1
                self._clock.begin_forward(self)
        except Exception as error:
            self.failed("root forward pre-hook", error)

    def failed(self, where: str, error: Exception) -> None:
        """Count an error inside capd and go on."""
        self._sink.drop_internal(where, error)

    def remove(self) -> None:
        """Stop for good, in compiled graphs too."""
        release(self._number)
