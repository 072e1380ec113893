"""A tap on one product of a model: its operands in the forward, its gradients in the backward.

Rules these taps keep, each for a way in which a simpler hook goes wrong:

* `register_full_backward_hook` is never used: it makes the output a view, and an in-place consumer fails.
* The micro-batch is bound when the forward runs; gradient hooks carry that moment and never ask for the time.
* dY is the gradient of the output as the product made it, also where something changes it in place later.
* dX is taken from an alias of the operand: the operand itself gets the sum over all its consumers.
* A recompute is not captured again; it only hangs the gradient hooks that its first pass could not.
* A hook returns None, except that the pre-hook hands aliased operands on when their gradients were asked for.
* A module is recognised by identity: copies of it, shallow ones and replicas too, are not captured.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol

import msgspec
import torch
from torch import Tensor, nn

from capd_client import recompute, split_backward
from capd_client.gate import Gate
from capd_client.graph_taps import claim, release
from capd_client.hook_objects import GradHook
from capd_client.key import Key, Moment
from capd_client.kinds import Kind, placement
from capd_client.naming import Place
from capd_client.parameter_gradient import ParameterHook, ParameterHooks
from capd_client.products import alias_of, autocast_dtype, hang, product_dtype, product_of
from capd_client.rule_settings import RuleSettings
from capd_client.rules import Kept, Wanted, rules_of
from capd_client.sites import Site, output_of
from capd_client.slicing import Slice
from capd_client.steering import Watches
from capd_client.stepping import Context
from capd_client.tensors import is_tracing
from capd_client.trials import trying

__all__ = ["Call", "Settings", "Sink", "Tap"]


class Settings(Protocol):
    """What `watch` and its taps need of `capd_client.config.ClientConfig`."""

    @property
    def steps(self) -> str: ...
    @property
    def micro_batches(self) -> str: ...
    @property
    def ranks(self) -> str: ...
    @property
    def slice(self) -> Optional[str]: ...
    @property
    def rules(self) -> tuple[RuleSettings, ...]: ...
    @property
    def store(self) -> str: ...
    @property
    def strict(self) -> bool: ...


class Sink(Protocol):
    """Where taps put their captures: `capd_client.api.Session`, or a list in tests."""

    @property
    def config(self) -> Settings: ...
    @property
    def context(self) -> Context: ...
    @property
    def steering(self) -> Watches: ...
    def offer(
        self,
        tensor: Tensor,
        key: Key,
        moment: Moment,
        *,
        cast_to: Optional[torch.dtype] = None,
        attributes: Optional[dict[str, Any]] = None,
        metadata: str = "",
        take: Optional[Slice] = None,
        store: Optional[str] = None,
    ) -> None: ...
    def keeps(self, moment: Moment) -> bool: ...
    def quant_type(self, dtype: torch.dtype) -> str: ...
    def prepare(self, devices: Iterable[torch.device]) -> None: ...
    def drop_internal(self, where: str, error: Exception) -> None: ...


class Call(NamedTuple):
    """One call of a tapped product that is captured, while it runs.

    rules: those that captured its moment, as bits; its gradients follow them. metadata: JSON object, or empty.
    hook: on the parameter that it uses, if its gradient is wanted; None: that of the last call.
    """

    moment: Moment
    rules: int
    recomputing: bool = False
    metadata: str = ""
    hook: Optional[ParameterHook] = None


class Tap:
    """Captures one product. Its methods may raise; who calls them hands errors on to `failed`."""

    __slots__ = (
        "__weakref__", "_at", "_attributes", "_calls", "_common", "_computed", "_describe", "_keys", "_lacks",
        "_of_tensor", "_parameter", "_parameter_at", "_parameter_hooks", "_sink", "_state", "_wanted", "bound", "gate",
        "kind", "module", "number", "place", "rules", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        site: Site,
        place: Place,
        wanted: Mapping[str, Wanted],
        sink: Sink,
        gate: Gate,
    ) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(site.module)
        self.kind: Kind = site.kind
        self.gate = gate
        self.place = place
        self._lacks = frozenset(name for name, _ in site.lacks)
        self._wanted: Mapping[str, Wanted] = {}  # by tensor name
        self.tensors: frozenset[str] = frozenset()  # the names of those that are captured, in some step
        self.rules = 0  # that want any of them, as bits
        self._want(wanted)
        self._computed = site.computed
        self._state = site.state
        self._parameter = site.parameter or site.kind.parameter
        self._sink = sink
        self._describe = site.describe
        self._common = site.attributes
        self._of_tensor = dict(site.of_tensor)
        self._attributes: dict[tuple[str, Optional[torch.dtype]], Optional[dict[str, Any]]] = {}
        self._keys: dict[tuple[str, torch.dtype], Key] = {}
        self._at = -1  # the iteration that _calls counts in
        self._calls: dict[int, int] = {}  # calls in each of its micro-batches
        self._parameter_at = (-1, False)  # the iteration whose parameter is captured, and whether all of it
        self.bound: Optional[Call] = None  # between the pre-hook and the forward hook of one call
        self._parameter_hooks = ParameterHooks()
        self.number = claim(self) if self.tensors else -1  # what compiled graphs know it by; -1: not at all

    def current(self) -> Optional[Tap]:
        """The tap that graphs mean by `number`: this one."""
        return self

    @property
    def name(self) -> str:
        """The module's name, as the keys carry it."""
        return self.place.module

    def shape_of(self, tensor_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept of a tensor of this shape."""
        wanted = self._wanted[tensor_name]
        kept = wanted.of(wanted.mask)
        return shape if kept is None or kept.take is None else kept.take.shape_of(shape)

    def keeps_tensor(self, tensor_name: str) -> bool:
        """Whether more than its statistics is kept, in some step."""
        return self._wanted[tensor_name].keeping != 0

    def steps_of(self, tensor_name: str) -> str:
        """The steps in which the job itself has most of this tensor kept."""
        wanted = self._wanted[tensor_name]
        return self.gate.steps_of(wanted.keeping or wanted.mask)

    def kept(self, tensor_name: str, call: Call) -> Optional[Kept]:
        """What the rules of this call want of a tensor; None: nothing."""
        wanted = self._wanted.get(tensor_name)
        return None if wanted is None else wanted.of(call.rules)

    @property
    def captured_at(self) -> int:
        """The last iteration in which a call was captured; -1 before the first."""
        return self._at

    def begin(
        self,
        module: nn.Module,
        operands: Sequence[Any],
        parameter: Any,
        args: tuple[Any, ...] = (),
        kwargs: Optional[dict[str, Any]] = None,
    ) -> Optional[Call]:
        """Bind the moment of a call that is about to run, and capture its operands; None if it is not captured.

        args, kwargs: what the module or the function was called with, where the site describes calls.
        """
        if not module.training or self.module() is not module or is_tracing():
            return None
        call = self._call()
        if call is None or not isinstance(operands[0], Tensor):
            return None
        if not call.recomputing:
            if self._describe is not None:
                call = call._replace(
                    metadata=msgspec.json.encode(self._describe(args, kwargs or {})).decode()
                )
            self._capture_operands(operands, parameter, call, autocast_dtype(operands[0].device.type))
        call = self._with_hook(call, parameter)  # in a recompute, too: there FSDP makes another weight
        if self._computed and isinstance(parameter, Tensor) and parameter.grad_fn is not None:
            self._hang_on_operand(call, f"grad_{self.kind.parameter}", parameter)
        return call

    def aliases(self, call: Call, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands to run the call with: those whose gradients are wanted as views of their own."""
        if not torch.is_grad_enabled():
            return operands
        return tuple(
            self._alias(call, f"grad_{name}", operand)
            for name, operand in zip(self.kind.operands, operands, strict=True)
        )

    def _alias(self, call: Call, gradient: str, operand: Any) -> Any:
        if not isinstance(operand, Tensor) or not operand.requires_grad or self.kept(gradient, call) is None:
            return operand
        alias = alias_of(operand)
        self._hang_on_operand(call, gradient, alias)
        return alias

    def _hang_on_operand(self, call: Call, gradient: str, operand: Tensor) -> None:
        """Have the gradient of what only this call uses captured, if it is wanted."""
        if operand.requires_grad and torch.is_grad_enabled() and self.kept(gradient, call) is not None:
            hang(operand, GradHook(self, gradient, call))

    def end(self, call: Call, result: Any) -> None:
        """Capture the output of the call and hang the gradient hooks on it."""
        output = output_of(result)
        if call.moment.iteration != self.gate.context.iteration or not isinstance(output, Tensor):
            return  # a call of another iteration is left over from a forward that raised
        if not call.recomputing:
            self._offer(output, "output", call)
        recompute.keep(self, call)
        if not torch.is_grad_enabled():
            return
        wanted = (self.kept(name, call) for name in ("grad_output", f"grad_{self.kind.parameter}"))
        if output.requires_grad and any(wanted):
            hang(product_of(output), GradHook(self, "grad_output", call, output.shape))

    def graph_call(self, tensors: Sequence[Any], autocast: Optional[torch.dtype]) -> Optional[Call]:
        """Capture one call that ran inside a compiled graph; returns it if it is a captured one.

        tensors: the operands, the parameter (or None) and the output.
        """
        *operands, parameter, output = tensors
        module = self.module()
        call = None if module is None else self._call()
        if call is None:
            return None
        # A read would compute what is made anew for every call.
        held = None if self._computed else getattr(module, self._parameter, None)
        if not call.recomputing:
            self._capture_operands(operands, held if parameter is None else parameter, call, autocast)
            self._offer(output, "output", call)
        call = self._with_hook(call, held)
        recompute.keep(self, call)
        return call

    def gradient(
        self, tensor_name: str, gradient: Tensor, call: Call, shape: Optional[torch.Size] = None
    ) -> None:
        """Capture a gradient under the moment of the forward it belongs to, as a tensor of `shape`."""
        if tensor_name == "grad_output":
            if split_backward.weights_of() is not None:
                return  # it came in the first part
            hook = call.hook or self._parameter_hooks.last
            if hook is not None and self.kept(f"grad_{self.kind.parameter}", call) is not None:
                hook.expect(call)
        if self.kept(tensor_name, call) is not None:
            if shape is not None and gradient.shape != shape:
                gradient = gradient.detach().reshape(shape)
            moment = msgspec.structs.replace(call.moment, time_ns=time.time_ns())
            self._offer(gradient, tensor_name, call._replace(moment=moment))

    def graph_gradient(self, place: Optional[int], gradient: Tensor, moment: Moment, rules: int) -> None:
        """Capture the gradient of the operand at `place`, or of the output, that came out of a compiled graph."""
        name = "grad_output" if place is None else f"grad_{self.kind.operands[place]}"
        self.gradient(name, gradient, Call(moment, rules))

    def failed(self, where: str, error: Exception) -> None:
        """Count an error inside capd and go on: nothing leaves a tap."""
        self._sink.drop_internal(f"{where} of {self.place.module}", error)

    def select(self, wanted: Mapping[str, Wanted]) -> None:
        """Capture these tensors from now on; none of them: gradients still under way are not captured either."""
        self._want(wanted)
        if f"grad_{self.kind.parameter}" not in self.tensors:
            self._parameter_hooks.remove()

    def remove(self) -> None:
        """Stop for good, in compiled graphs too."""
        self.select({})
        release(self.number)

    def _want(self, wanted: Mapping[str, Wanted]) -> None:
        had = {name: one for name, one in wanted.items() if name not in self._lacks}
        self._wanted, self.tensors, self.rules = had, frozenset(had), rules_of(had)

    def _call(self) -> Optional[Call]:
        """The call about to run, or None if it is not captured."""
        if recompute.in_backward():
            first: Optional[Call] = recompute.take(self)
            return None if first is None else first._replace(recomputing=True)
        rules = 0 if trying() else self.gate.admits() & self.rules
        if not rules:
            return None
        context = self.gate.context
        if context.iteration != self._at:
            self._at = context.iteration
            self._calls.clear()
        number = self._calls.get(context.micro_batch, 0)
        self._calls[context.micro_batch] = number + 1
        return Call(context.moment(call=number, recompute=False), rules)

    def _capture_operands(
        self, operands: Sequence[Any], parameter: Any, call: Call, autocast: Optional[torch.dtype]
    ) -> None:
        for name, operand in zip(self.kind.operands, operands, strict=True):
            if isinstance(operand, Tensor):
                self._offer(operand, name, call, product_dtype(operand, autocast))
        kept, iteration = self.kept(self.kind.parameter, call), call.moment.iteration
        if kept is None or not isinstance(parameter, Tensor):
            return
        whole = kept.store != "stats"
        if self._parameter_at in ((iteration, True), (iteration, whole)):
            return  # otherwise another rule has kept its statistics alone, if anything
        # Otherwise it comes with the first call that is kept.
        if not self._computed and self._sink.keeps(call.moment):
            self._parameter_at = (iteration, whole)
        self._offer_parameter(parameter, call, product_dtype(parameter, autocast))

    def _offer_parameter(self, parameter: Tensor, call: Call, cast_to: Optional[torch.dtype]) -> None:
        name, module = self.kind.parameter, self.module()
        if self._state is None or module is None:
            self._offer(parameter, name, call, cast_to)
            return
        state = self._state(module)
        attributes = {**(self._attributes_of(name, None) or {}), **state.attributes}
        self._offer(parameter, name, call, None, attributes)
        for suffix, tensor in state.tensors.items():
            self._offer(tensor, f"{name}.{suffix}", call, None, attributes, part_of=name)

    def _with_hook(self, call: Call, parameter: Any) -> Call:
        """The call with the hook that the gradient of its parameter comes through, if it is wanted."""
        if self.kept(f"grad_{self.kind.parameter}", call) is None:
            return call
        if self._computed and isinstance(parameter, Tensor) and parameter.grad_fn is not None:
            return call  # it is an operand like any other
        return call._replace(hook=self._parameter_hooks.on(parameter, self))

    def _offer(
        self,
        tensor: Tensor,
        tensor_name: str,
        call: Call,
        cast_to: Optional[torch.dtype] = None,
        attributes: Optional[dict[str, Any]] = None,
        *,
        part_of: Optional[str] = None,
    ) -> None:
        """Capture a tensor if it is wanted; `part_of`: whole, if that one is."""
        kept = self.kept(part_of or tensor_name, call)
        if kept is None:
            return
        if attributes is None:
            attributes = self._attributes_of(tensor_name, None if cast_to is None else tensor.dtype)
        self._sink.offer(
            tensor,
            self._key(tensor_name, cast_to or tensor.dtype),
            call.moment,
            cast_to=cast_to,
            attributes=attributes,
            metadata=call.metadata,
            take=None if part_of else kept.take,
            store=kept.store,
        )

    def _attributes_of(self, tensor_name: str, cast_from: Optional[torch.dtype]) -> Optional[dict[str, Any]]:
        asked = (tensor_name, cast_from)
        if asked not in self._attributes:
            found = dict((*self._common, *self._of_tensor.get(tensor_name, ())))
            if cast_from is not None:
                found["cast_from"] = str(cast_from).removeprefix("torch.")
            self._attributes[asked] = found or None
        return self._attributes[asked]

    def _key(self, tensor_name: str, dtype: torch.dtype) -> Key:
        rank = self.gate.context.bind()
        key = self._keys.get((tensor_name, dtype))
        if key is None or key.rank != rank:
            operation, phase = placement(tensor_name)
            key = self._keys[tensor_name, dtype] = Key(
                quant_type=self._sink.quant_type(dtype), rank=rank, tensor_name=tensor_name,
                layer=self.place.layer, phase=phase, layer_type=self.kind.layer_type, operation=operation,
                component=self.kind.component, module=self.place.module, stack=self.place.stack,
            )  # fmt: skip
        return key
