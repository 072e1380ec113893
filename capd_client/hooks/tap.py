"""A tap on one product of a model: captures its operands in the forward and its gradients in the backward.

A tap follows these rules, because a simpler hook would fail:

* `register_full_backward_hook` is never used. It makes the output a view, and an in-place consumer fails.
* The forward binds the micro-batch. Gradient hooks carry this moment and never ask the clock.
* dY is the gradient of the output as the product computed it, even if the job changes the output in place later.
* dX is taken from an alias of the operand. The operand itself gets the sum over all its consumers.
* A recompute is not captured again. It only adds the gradient hooks that its first pass could not add.
* A hook returns None. Only the pre-hook returns aliased operands, if their gradients are wanted.
* A module is recognised by identity. Its copies are not captured, including shallow copies and replicas.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import msgspec
import torch
from torch import Tensor, nn

from capd_client.graph.taps import claim, release
from capd_client.hooks.calls import Call, CapturedCalls
from capd_client.hooks.gradients import GradHook, ParameterHooks
from capd_client.hooks.module_names import Place
from capd_client.hooks.offers import Offers
from capd_client.hooks.sink import Sink
from capd_client.hooks.sites import Site, output_of
from capd_client.protocol.key import Moment
from capd_client.protocol.kinds import Kind
from capd_client.rules.resolve import Wanted
from capd_client.steps import split_backward
from capd_client.steps.gate import Gate
from capd_client.tensors.autograd import alias_of, autocast_dtype, hang, product_dtype, product_of
from capd_client.tensors.inspect import is_tracing

__all__ = ["Tap"]


class Tap:
    """A tap on one product. Its methods may raise; callers pass the errors to `failed`."""

    __slots__ = (
        "__weakref__", "_calls", "_computed", "_describe", "_gradients", "_parameter", "_parameter_gradient",
        "_parameter_hooks", "_sink", "bound", "gate", "kind", "module", "number", "offers", "place", "uses_parameter",
    )  # fmt: skip

    def __init__(
        self,
        site: Site,
        place: Place,
        wanted: Mapping[str, Wanted],
        sink: Sink,
        gate: Gate,
    ) -> None:
        """Claim a number for compiled graphs if any tensor is wanted.

        Args:
            site: The product.
            place: The place of the product in the model.
            wanted: The wishes of the rules, by tensor name.
            sink: Receives the captures.
            gate: Says which steps are captured.
        """
        self.module: weakref.ref[nn.Module] = weakref.ref(site.module)
        self.kind: Kind = site.kind
        self.gate = gate
        self.place = place
        self._computed = site.computed
        self._parameter = site.parameter or site.kind.parameter
        self._sink = sink
        self._describe = site.describe
        self._calls = CapturedCalls(gate)
        self._gradients = tuple(f"grad_{name}" for name in site.kind.operands)
        self._parameter_gradient = f"grad_{site.kind.parameter}"
        self.offers = Offers(site, place, wanted, sink)
        # Whether callers have to pass the parameter.
        self.uses_parameter = self._uses_parameter()
        self._parameter_hooks = ParameterHooks()
        # The call between its pre-hook and its forward hook.
        self.bound: Optional[Call] = None
        # The tap's number in compiled graphs; -1: graphs do not use it.
        self.number = claim(self) if self.tensors else -1

    def current(self) -> Optional[Tap]:
        """Return the tap that graphs use under `number`: this one."""
        return self

    @property
    def closed(self) -> bool:
        """Return whether the current iteration is known not to be captured."""
        return self.gate.closed_at == self.gate.context.iteration

    @property
    def tensors(self) -> frozenset[str]:
        """Return the names of the tensors that are captured in some step."""
        return self.offers.tensors

    def steps_of(self, tensor_name: str) -> str:
        """Return the steps in which the job's own rules keep most of this tensor."""
        wanted = self.offers.wanted(tensor_name)
        return self.gate.steps_of(wanted.keeping or wanted.mask)

    @property
    def captured_at(self) -> int:
        """Return the last iteration in which a call was captured; -1 before the first."""
        return self._calls.at

    def begin(
        self,
        module: nn.Module,
        operands: Sequence[Any],
        parameter: Any,
        args: tuple[Any, ...] = (),
        kwargs: Optional[dict[str, Any]] = None,
    ) -> Optional[Call]:
        """Bind the moment of a call that is about to run, and capture its operands.

        Args:
            module: The module of the product.
            operands: The operands, in the order of the kind.
            parameter: The parameter; None if there is none or `uses_parameter` is False.
            args: The arguments of the module or the function. Only sites that describe calls need them.
            kwargs: The keyword arguments.

        Returns:
            The call, or None if it is not captured.
        """
        if not module.training or self.module() is not module or is_tracing():
            return None
        call = self._calls.next(self.offers.rules)
        if call is None or not isinstance(operands[0], Tensor):
            return None
        if not call.recomputing:
            if self._describe is not None:
                metadata = msgspec.json.encode(self._describe(args, kwargs or {})).decode()
                call = msgspec.structs.replace(call, metadata=metadata)
            self._capture_operands(operands, parameter, call, autocast_dtype(operands[0].device.type))
        # A recompute needs the hook, too, because FSDP creates another weight for it.
        if self.uses_parameter:
            call = self._with_hook(call, parameter)
        return call

    def aliases(self, call: Call, operands: tuple[Any, ...]) -> Optional[tuple[Any, ...]]:
        """Replace every operand whose gradient is captured by a view with its own gradient.

        Returns:
            The operands, or None if no gradient is captured.
        """
        if not torch.is_grad_enabled():
            return None
        kept = self.offers.kept[call.rules]
        aliased: Optional[list[Any]] = None
        for place, name in enumerate(self._gradients):
            operand = operands[place]
            if name in kept and isinstance(operand, Tensor) and operand.requires_grad:
                aliased = aliased or list(operands)
                aliased[place] = alias = alias_of(operand)
                hang(alias, GradHook(self, name, call))
        return None if aliased is None else tuple(aliased)

    def wants(self, tensor_name: str, call: Call) -> bool:
        """Return whether the rules of this call want a tensor."""
        return tensor_name in self.offers.kept[call.rules]

    def end(self, call: Call, result: Any) -> None:
        """Capture the output of the call and put the gradient hook on it."""
        output = output_of(result)
        # A call of another iteration is left over from a forward that raised.
        if call.moment.iteration != self.gate.context.iteration or not isinstance(output, Tensor):
            return
        if not call.recomputing:
            self.offers.tensor(output, "output", call)
        self._calls.keep(call)
        if not torch.is_grad_enabled() or not output.requires_grad:
            return
        kept = self.offers.kept[call.rules]
        if "grad_output" in kept or self._parameter_gradient in kept:
            hang(product_of(output), GradHook(self, "grad_output", call, output.shape))

    def graph_call(
        self, tensors: Sequence[Any], autocast: Optional[torch.dtype], *, made: bool
    ) -> Optional[Call]:
        """Capture one call that ran inside a compiled graph.

        Args:
            tensors: The operands, the parameter (or None) and the output.
            autocast: The dtype of autocast when the graph was traced; None without autocast.
            made: Whether the graph computes the parameter. It then contains the hook on the parameter's gradient.

        Returns:
            The call, or None if it is not captured.
        """
        *operands, parameter, output = tensors
        module = self.module()
        call = None if module is None else self._calls.next(self.offers.rules)
        if call is None:
            return None
        held = _held(module, self._parameter)
        if not call.recomputing:
            self._capture_operands(operands, held if parameter is None else parameter, call, autocast)
            self.offers.tensor(output, "output", call)
        if not made:
            call = self._with_hook(call, held)
        self._calls.keep(call)
        return call

    def gradient(
        self, tensor_name: str, gradient: Tensor, call: Call, shape: Optional[torch.Size] = None
    ) -> None:
        """Capture a gradient under the moment of its own forward.

        Args:
            tensor_name: The name of the gradient, as in "grad_output".
            gradient: The gradient.
            call: The call of the forward.
            shape: The shape of the record. Default: the shape of `gradient`.
        """
        if tensor_name == "grad_output":
            # In a split backward, dY has already come in the part that computes the inputs' gradients.
            if split_backward.weights_of() is not None:
                return
            if call.hook >= 0:
                self._parameter_hooks.expect(call)
        if tensor_name not in self.offers.kept[call.rules]:
            return
        if shape is not None and gradient.shape != shape:
            gradient = gradient.detach().reshape(shape)
        moment = msgspec.structs.replace(call.moment, time_ns=time.time_ns())
        self.offers.tensor(gradient, tensor_name, call, moment=moment)

    def graph_gradient(
        self, place: Optional[int], gradient: Tensor, moment: Moment, rules: int, hook: int
    ) -> None:
        """Capture a gradient that came out of a compiled graph.

        Args:
            place: The index of the operand. The parameter has the index after the last operand. None: the output.
            gradient: The gradient.
            moment: The moment of the forward.
            rules: The rules that captured the call, as bits.
            hook: The number of the hook on the parameter; -1 without a hook.
        """
        names = (*self.kind.operands, self.kind.parameter)
        name = "grad_output" if place is None else f"grad_{names[place]}"
        rank = self.gate.context.bind()
        self.gradient(name, gradient, Call(moment, rules, rank, hook=hook))

    def failed(self, where: str, error: Exception) -> None:
        """Count an error inside capd and go on. No error leaves a tap."""
        self._sink.drop_internal(f"{where} of {self.place.module}", error)

    def select(self, wanted: Mapping[str, Wanted]) -> None:
        """Capture these tensors from now on. Without any, pending gradients are not captured either."""
        self.offers.want(wanted)
        self.uses_parameter = self._uses_parameter()
        if self._parameter_gradient not in self.tensors:
            self._parameter_hooks.remove()

    def remove(self) -> None:
        """Stop permanently, also in compiled graphs."""
        self.select({})
        release(self.number)

    def _capture_operands(
        self, operands: Sequence[Any], parameter: Any, call: Call, autocast: Optional[torch.dtype]
    ) -> None:
        for name, operand in zip(self.kind.operands, operands, strict=True):
            if isinstance(operand, Tensor):
                cast_to = None if autocast is None else product_dtype(operand, autocast)
                self.offers.tensor(operand, name, call, cast_to)
        if isinstance(parameter, Tensor):
            self.offers.parameter(parameter, self.module(), call, product_dtype(parameter, autocast))

    def _uses_parameter(self) -> bool:
        return self.kind.parameter in self.tensors or self._parameter_gradient in self.tensors

    def _with_hook(self, call: Call, parameter: Any) -> Call:
        """Return the call with the hook on its parameter, if the parameter's gradient is wanted."""
        if not self.wants(self._parameter_gradient, call):
            return call
        if self._computed and isinstance(parameter, Tensor) and parameter.grad_fn is not None:
            # Only this call uses a computed parameter, so its gradient needs no other hook.
            if parameter.requires_grad and torch.is_grad_enabled():
                hang(parameter, GradHook(self, self._parameter_gradient, call))
            return call
        return msgspec.structs.replace(call, hook=self._parameter_hooks.on(parameter, self))


def _held(module: Any, name: str) -> Any:
    """Return the parameter that the module stores; None if the module computes it.

    A read would compute it again, which could change the job's random numbers.
    """
    *inside, name = name.split(".")
    for part in inside:
        module = getattr(module, part, None)
    return None if module is None else module._parameters.get(name, vars(module).get(name))
