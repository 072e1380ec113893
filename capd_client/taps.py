"""The taps on one nn.Linear: its operands in the forward, its gradients in the backward.

Rules these taps keep, each for a way in which a simpler hook goes wrong:

* `register_full_backward_hook` is never used: it makes the output a view, and an in-place consumer fails.
* The micro-batch is bound when the forward runs; gradient hooks carry that moment and never ask for the time.
* dY is the gradient of the output as the product made it, also where something changes it in place later.
* dX is taken from an alias of the input: the input itself gets the sum over all its consumers.
* A recompute is not captured again; it only hangs the gradient hooks that its first pass could not.
* A tap returns None, except that the pre-hook hands the aliased input on when grad_input was asked for.
* A module is recognised by identity: copies of it, shallow ones and replicas too, are not captured.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from capd_client import recompute
from capd_client.graph_taps import claim, release
from capd_client.hook_objects import GradHook, PreHookResult, WeightHook, with_input
from capd_client.key import Key, Moment
from capd_client.naming import Place
from capd_client.products import alias_of, autocast_dtype, hang, hangs_on, product_dtype, product_of
from capd_client.slicing import Slice
from capd_client.steering import Steering
from capd_client.stepping import Context, Gate
from capd_client.tensors import is_tracing

__all__ = ["LinearTap", "Settings", "Sink"]

_PLACEMENT = {  # tensor name → operation, phase
    "input": ("forward", "pre"),
    "weight": ("forward", "pre"),
    "output": ("forward", "post"),
    "grad_output": ("backward", "pre"),
    "grad_input": ("backward", "post"),
    "grad_weight": ("backward", "post"),
}


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
    def strict(self) -> bool: ...


class Sink(Protocol):
    """Where taps put their captures: `capd_client.api.Session`, or a list in tests."""

    @property
    def config(self) -> Settings: ...
    @property
    def context(self) -> Context: ...
    @property
    def steering(self) -> Steering: ...
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
    ) -> None: ...
    def keeps(self, moment: Moment) -> bool: ...
    def quant_type(self, dtype: torch.dtype) -> str: ...
    def prepare(self, devices: Iterable[torch.device]) -> None: ...
    def drop_internal(self, where: str, error: Exception) -> None: ...


class LinearTap:
    """Captures one nn.Linear. Its methods may raise; the hook objects hand errors on to `failed`."""

    __slots__ = (
        "__weakref__", "_at", "_backward", "_calls", "_keys", "_place", "_recomputing", "_sink", "_slices",
        "_tensors", "_weight_at", "_weight_handle", "bound", "gate", "module", "number",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Linear,
        place: Place,
        tensors: frozenset[str],
        slices: Mapping[str, Slice],
        sink: Sink,
        gate: Gate,
    ) -> None:
        self.module = weakref.ref(module)
        self.gate = gate
        self._place = place
        self._tensors = tensors
        self._slices = slices
        self._sink = sink
        self._keys: dict[tuple[str, torch.dtype], Key] = {}
        self._at = (-1, -1)  # the iteration and micro-batch that _calls counts in
        self._calls = 0
        self._weight_at = -1  # the iteration whose weight is captured
        self.bound: Optional[Moment] = None  # between the pre-hook and the forward hook of one call
        self._recomputing = False
        self._backward: tuple[int, Optional[Moment]] = (-1, None)  # graph task and moment of the last dY
        self._weight_handle: Optional[RemovableHandle] = None
        self.number = claim(self) if tensors else -1  # what compiled graphs know it by; -1: not at all

    @property
    def tensors(self) -> frozenset[str]:
        """The names of the tensors that this tap captures."""
        return self._tensors

    @property
    def name(self) -> str:
        """The module's name, as the keys carry it."""
        return self._place.module

    @property
    def captured_at(self) -> int:
        """The last iteration in which a call was captured; -1 before the first."""
        return self._at[0]

    @property
    def expects_weight_gradient(self) -> bool:
        """Whether a captured dY came through and its dW did not yet."""
        return self._backward[1] is not None

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PreHookResult:
        """Bind the moment of this call, capture its operands, and alias its input if dX is wanted."""
        self.bound = None
        if not module.training or self.module() is not module or is_tracing():
            return None
        moment = self._moment_of_call()
        x = args[0] if args else kwargs.get("input")
        if moment is None or not isinstance(x, Tensor):
            return None
        if not self._recomputing:
            self._capture_operands(x, module.weight, moment, autocast_dtype(x.device.type))
            self._watch_weight_gradient(module)
        self.bound = moment
        if "grad_input" not in self._tensors or not x.requires_grad or not torch.is_grad_enabled():
            return None
        alias = alias_of(x)
        hang(alias, GradHook(self, "grad_input", moment))
        return with_input(alias, args, kwargs)

    def after_forward(self, output: Any) -> None:
        """Capture the output of the call and hang the gradient hooks on it."""
        moment, self.bound = self.bound, None
        if (
            moment is None
            or moment.iteration != self.gate.context.iteration
            or not isinstance(output, Tensor)
        ):
            return  # a moment of another iteration is left over from a forward that raised
        if not self._recomputing and "output" in self._tensors:
            self._offer(output, "output", moment)
        recompute.keep(self, moment)
        if not torch.is_grad_enabled():
            return
        if output.requires_grad and not self._tensors.isdisjoint(("grad_output", "grad_weight")):
            hang(product_of(output), GradHook(self, "grad_output", moment, output.shape))

    def graph_call(
        self, x: Tensor, weight: Optional[Tensor], output: Tensor, autocast: Optional[torch.dtype]
    ) -> Optional[Moment]:
        """Capture one call that ran inside a compiled graph; returns its moment if it is a captured one."""
        module = self.module()
        moment = None if module is None else self._moment_of_call()
        if module is None or moment is None:
            return None
        if not self._recomputing:
            self._capture_operands(x, weight, moment, autocast)
            if "output" in self._tensors:
                self._offer(output, "output", moment)
            self._watch_weight_gradient(module)
        recompute.keep(self, moment)
        return moment

    def gradient(
        self, tensor_name: str, gradient: Tensor, moment: Moment, shape: Optional[torch.Size] = None
    ) -> None:
        """Capture a gradient under the moment of the forward it belongs to, as a tensor of `shape`."""
        if tensor_name == "grad_output" and "grad_weight" in self._tensors:
            self._backward = (torch._C._current_graph_task_id(), moment)
        if tensor_name in self._tensors:
            if shape is not None and gradient.shape != shape:
                gradient = gradient.detach().reshape(shape)
            self._offer(gradient, tensor_name, msgspec.structs.replace(moment, time_ns=time.time_ns()))

    def weight_gradient(self, gradient: Tensor) -> None:
        """Capture dW: the sum over the module's calls in this backward, under the moment of the first call.

        The gradients of the outputs come before it in the same backward, in reverse order of the calls.
        """
        (task, moment), self._backward = self._backward, (-1, None)
        if moment is not None and task == torch._C._current_graph_task_id():
            self.gradient("grad_weight", gradient, moment)

    def failed(self, where: str, error: Exception) -> None:
        """Count an error inside capd and go on: nothing leaves a tap."""
        self._sink.drop_internal(f"{where} of {self._place.module}", error)

    def select(self, tensors: frozenset[str]) -> None:
        """Capture these tensors from now on; none of them: gradients still under way are not captured either."""
        self._tensors = tensors
        if "grad_weight" not in tensors:
            self._unhook_weight()

    def remove(self) -> None:
        """Stop for good, in compiled graphs too."""
        self.select(frozenset())
        release(self.number)

    def _unhook_weight(self) -> None:
        if self._weight_handle is not None:
            self._weight_handle.remove()
            self._weight_handle = None

    def _moment_of_call(self) -> Optional[Moment]:
        """The moment that the call about to run belongs to, or None if it is not captured."""
        self._recomputing = recompute.in_backward()
        if self._recomputing:
            return recompute.take(self)
        if not self.gate.admits() or not self._tensors:
            return None
        context = self.gate.context
        at = (context.iteration, context.micro_batch)
        self._calls = self._calls + 1 if at == self._at else 0
        self._at = at
        return context.moment(call=self._calls, recompute=False)

    def _capture_operands(
        self, x: Tensor, weight: Any, moment: Moment, autocast: Optional[torch.dtype]
    ) -> None:
        if "input" in self._tensors:
            self._offer(x, "input", moment, product_dtype(x, autocast))
        if "weight" in self._tensors and self._weight_at != moment.iteration and isinstance(weight, Tensor):
            if self._sink.keeps(moment):  # else it comes with the first call that is kept
                self._weight_at = moment.iteration
            self._offer(weight, "weight", moment, product_dtype(weight, autocast))

    def _watch_weight_gradient(self, module: nn.Module) -> None:
        if "grad_weight" not in self._tensors:
            return
        weight, handle = module.weight, self._weight_handle
        if not isinstance(weight, Tensor) or not weight.requires_grad:
            return
        if handle is None or not hangs_on(handle, weight):
            self._unhook_weight()  # sharding wrappers give a module new weight tensors
            self._weight_handle = hang(weight, WeightHook(self))

    def _offer(
        self, tensor: Tensor, tensor_name: str, moment: Moment, cast_to: Optional[torch.dtype] = None
    ) -> None:
        key = self._key(tensor_name, cast_to or tensor.dtype)
        take = self._slices.get(tensor_name)
        if cast_to is None:
            self._sink.offer(tensor, key, moment, take=take)
        else:
            attributes = {"cast_from": str(tensor.dtype).removeprefix("torch.")}
            self._sink.offer(tensor, key, moment, cast_to=cast_to, attributes=attributes, take=take)

    def _key(self, tensor_name: str, dtype: torch.dtype) -> Key:
        rank = self.gate.context.bind()
        key = self._keys.get((tensor_name, dtype))
        if key is None or key.rank != rank:
            operation, phase = _PLACEMENT[tensor_name]
            key = self._keys[tensor_name, dtype] = Key(
                quant_type=self._sink.quant_type(dtype), rank=rank, tensor_name=tensor_name,
                layer=self._place.layer, phase=phase, layer_type="linear", operation=operation,
                component="linear", module=self._place.module, stack=self._place.stack,
            )  # fmt: skip
        return key
