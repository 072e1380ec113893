"""The hooks on the modules of a watched model: small, picklable, inert in copies, never raising.

Quantisation in place moves hooks to another module and may call them without keyword arguments. They then do nothing.
Each hook first asks whether this step is captured. In other steps, the hook costs only this question.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from capd_client.graph.taps import (
    GRAD_OUTPUT,
    claim,
    gradients_of,
    graph_aliases,
    graph_input,
    release,
    trace_call,
    trace_root,
    trace_root_end,
)
from capd_client.hooks.base import Hook
from capd_client.hooks.sink import Sink
from capd_client.hooks.sites import Site, operands_of, output_of, with_operands
from capd_client.hooks.tap import Tap
from capd_client.process.dynamo import traced_as
from capd_client.steps.checkpointing import in_backward, in_segment
from capd_client.steps.clock import Clock
from capd_client.steps.trial_runs import Trial, trying
from capd_client.tensors.inspect import is_tracing

__all__ = ["ForwardHook", "PreHook", "RootEnd", "RootHook"]

PreHookResult = Optional[tuple[tuple[Any, ...], dict[str, Any]]]


class PreHook(Hook):
    """A forward pre-hook (with kwargs) on a module whose arguments are the operands of a product."""

    __slots__ = ("_aliased", "_arguments", "_gate", "_parameter", "_tap")

    def __init__(self, tap: Tap, site: Site) -> None:
        self._tap = tap
        self._gate = tap.gate
        self._arguments = site.arguments
        self._parameter = site.kind.parameter
        wanted = gradients_of(tap.kind, tap.tensors) if tap.number >= 0 else 0
        # The bits of the operands.
        self._aliased = wanted & ~GRAD_OUTPUT

    def in_graph(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Optional[dict[str, Any]] = None
    ) -> PreHookResult:
        """Replace operands whose gradients are wanted by aliases. The compiler traces this in place of the hook."""
        if not self._aliased or not module.training or kwargs is None:
            return None
        operands = operands_of(self._arguments, args, kwargs)
        return with_operands(self._arguments, graph_aliases(self._aliased, operands), args, kwargs)

    @traced_as(in_graph)
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Optional[dict[str, Any]] = None
    ) -> PreHookResult:
        gate = self._gate
        if gate.closed_at == gate.context.iteration or is_compiling() or kwargs is None:
            return None
        tap = self._tap
        try:
            tap.bound = None
            operands = operands_of(self._arguments, args, kwargs)
            parameter = getattr(module, self._parameter, None) if tap.uses_parameter else None
            call = tap.begin(module, operands, parameter, args, kwargs)
            if call is None:
                return None
            tap.bound = call
            aliases = tap.aliases(call, operands)
            if aliases is None:
                return None
            return with_operands(self._arguments, aliases, args, kwargs)
        except Exception as error:
            tap.failed("forward pre-hook", error)
            return None


class ForwardHook(Hook):
    """A forward hook (with kwargs) on a module whose arguments are the operands of a product."""

    __slots__ = ("_arguments", "_gradients", "_number", "_parameter", "_tap")

    def __init__(self, tap: Tap, site: Site) -> None:
        self._tap = tap
        self._arguments = site.arguments
        self._parameter = site.kind.parameter
        self._number = graph_input(tap.number)
        self._gradients = gradients_of(tap.kind, tap.tensors)

    def in_graph(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        """Put the whole call into the graph. The compiler traces this in place of the hook."""
        number, product = self._number, output_of(output)
        if number is None or not module.training or not isinstance(product, Tensor):
            return
        parameter: Any = getattr(module, self._parameter) if self._parameter else None
        operands = operands_of(self._arguments, args, kwargs)
        trace_call(number, self._gradients, *operands, parameter, product)

    @traced_as(in_graph)
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        tap = self._tap
        call = tap.bound
        if call is None:
            return
        tap.bound = None
        try:
            tap.end(call, output)
        except Exception as error:
            tap.failed("forward hook", error)


class RootHook(Hook):
    """A forward pre-hook on the watched model: every training forward begins a micro-batch.

    A forward without gradients is an evaluation and is not captured, even if the job left the model in training mode.
    The first pass of a checkpointed segment runs without gradients, too, but is no evaluation.
    """

    __slots__ = (
        "__weakref__", "_before", "_begun", "_clock", "_input", "_number", "_outer", "_root", "_sink", "_trial",
        "forwards",
    )  # fmt: skip

    def __init__(
        self,
        root: nn.Module,
        clock: Clock,
        sink: Sink,
        *,
        before: Callable[[], None],
        begun: Callable[[], None],
    ) -> None:
        """Claim a number for compiled graphs.

        Args:
            root: The watched model.
            clock: Counts iterations and micro-batches.
            sink: Counts errors inside capd.
            before: Called before a training forward begins its micro-batch. Must not raise.
            begun: Called after a training forward has begun its micro-batch. Must not raise.
        """
        self._root = weakref.ref(root)
        self._clock = clock
        self._sink = sink
        self._trial = Trial(root)
        self._before = before
        self._begun = begun
        # The training forwards that this hook has seen.
        self.forwards = 0
        # Whether the current forward is inside an evaluation; None outside of a forward.
        self._outer: Optional[bool] = None
        self._number = claim(self)
        self._input = graph_input(self._number)

    def in_graph(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put the beginning of the forward into the graph. The compiler traces this in place of the hook."""
        if self._input is not None and module.training:
            trace_root(self._input, torch.is_grad_enabled())

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and not is_compiling() and self._root() is module and not is_tracing():
            self.begin(torch.is_grad_enabled())

    def begin(self, with_gradients: bool) -> None:
        """Begin a forward of the root in training mode. Without gradients, it is an evaluation."""
        try:
            if in_backward() or trying() or self._trial.begins():
                return
            clock = self._clock
            self._outer = clock.context.evaluating
            if clock.begin_forward(self, trains=with_gradients or in_segment(), before=self._before):
                self.forwards += 1
                self._begun()
        except Exception as error:
            self.failed("root forward pre-hook", error)

    def end(self) -> None:
        """End the forward, also if it has raised."""
        self._trial.end()
        if self._outer is not None:
            self._clock.context.evaluating, self._outer = self._outer, None
            self._clock.context.end_forward()

    def end_in_graph(self, module: nn.Module) -> None:
        """Put the end of an evaluation into the graph. The compiler traces this in place of `end`."""
        if self._input is not None and module.training and not torch.is_grad_enabled():
            trace_root_end(self._input)

    def failed(self, where: str, error: Exception) -> None:
        """Count an error inside capd and go on."""
        self._sink.drop_internal(where, error)

    def remove(self) -> None:
        """Stop permanently, also in compiled graphs."""
        release(self._number)


class RootEnd(Hook):
    """A forward hook on the watched model. It also runs when the forward raises."""

    __slots__ = ("_root",)

    def __init__(self, root: RootHook) -> None:
        self._root = root

    def in_graph(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Put the end of the forward into the graph. The compiler traces this in place of the hook."""
        self._root.end_in_graph(module)

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._root.end()
