"""The operands that TransformerEngine's inspection passes on, before and after their cast.

The feature in capd_client/nvdlfw_features calls this module. The inspection passes a layer's tensors one by one and
does not name the call that they belong to. In the forward the activation comes first, in the backward the gradient.

A layer's backwards come in the order of their micro-batches. Within a micro-batch the last call's backward comes
first. So a layer's calls wait in a queue for their backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import msgspec
import torch

from capd_client.config.watch_arguments import WatchPlan
from capd_client.hooks.calls import Call
from capd_client.hooks.module_names import Place, place_of
from capd_client.hooks.sink import Sink
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.kinds import LINEAR, placement
from capd_client.rules.resolve import Target, Wanted, resolve
from capd_client.session.current import session
from capd_client.steps import checkpointing
from capd_client.steps.collection import quota_of
from capd_client.steps.gate import Gate

__all__ = ["begin", "inspected", "inspects", "te_features", "wants"]

_NAMES = {
    "activation": "input", "weight": "weight", "output": "output",
    "gradient": "grad_output", "dgrad": "grad_input", "wgrad": "grad_weight",
}  # fmt: skip

_begun = False
_inspection: Optional[_Inspection] = None


def te_features() -> str:
    """Return the directory of CapdCapture, for `nvdlfw_inspect.api.initialize(feature_dirs=[..., te_features()])`."""
    return str(Path(__file__).parent.parent / "nvdlfw_features")


def begin() -> None:
    """Note that TransformerEngine has loaded the feature.

    From now on the feature captures the linears, and `watch` does not.
    """
    global _begun
    _begun = True


def inspects() -> bool:
    """Whether the feature was loaded. If so, the feature captures the linears."""
    return _begun


def wants() -> bool:
    """Whether the current iteration is captured. Never raises."""
    return _guarded(lambda inspection: inspection.wants()) or False


def inspected(layer: str, tensor_name: str, tensors: Sequence[Any], tp_size: int) -> None:
    """Capture a tensor of a layer. Never raises.

    Args:
        layer: The layer's name.
        tensor_name: The tensor's name in the inspection, such as "activation".
        tensors: The tensor before and after its cast, as far as they exist.
        tp_size: The number of tensor parallel ranks.
    """
    _guarded(lambda inspection: inspection.take(layer, tensor_name, tensors, tp_size))


def _guarded(function: Any) -> Any:
    global _inspection
    sink = session()
    if sink is None:
        return None
    try:
        if _inspection is None or _inspection.sink is not sink:
            _inspection = _Inspection(sink)
        return function(_inspection)
    except Exception as error:
        sink.drop_internal("TransformerEngine's inspection", error)
        return None


class _Layer:
    """One layer: its keys, and the pending calls without a backward. The calls of a micro-batch are in one list."""

    def __init__(self, place: Place, wanted: Mapping[str, Wanted]) -> None:
        self.place = place
        self.wanted = wanted
        self.keys: dict[tuple[str, torch.dtype], Key] = {}
        self.iteration = -1
        # The number of calls in each micro-batch.
        self.calls: dict[int, int] = {}
        self.waiting: dict[int, list[Call]] = {}
        self.forward: Optional[Call] = None
        self.backward: Optional[Call] = None
        self.weight_at = -1

    def begin(self, moment: Moment, rules: int, rank: int) -> Call:
        """Begin a call. The first tensor of its forward has arrived."""
        if moment.iteration != self.iteration:
            self.iteration = moment.iteration
            self.calls, self.waiting = {}, {}
        number = self.calls.get(moment.micro_batch, 0)
        self.calls[moment.micro_batch] = number + 1
        call = Call(msgspec.structs.replace(moment, call=number), rules, rank)
        self.waiting.setdefault(moment.micro_batch, []).append(call)
        return call

    def begin_backward(self) -> Optional[Call]:
        """Return the call whose backward begins. None if its forward was not captured."""
        if not self.waiting:
            return None
        first = next(iter(self.waiting))
        call = self.waiting[first].pop()
        if not self.waiting[first]:
            del self.waiting[first]
        return call


class _Inspection:
    """The layers of one session."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._rules = WatchPlan(sink.config).rules
        quota = quota_of(sink.config, sink.context)
        self._gate = Gate(sink.context, [rule.when for rule in self._rules], quota)
        self._layers: dict[str, _Layer] = {}

    def wants(self) -> bool:
        """Whether the coming forward is captured. Only before the forward is it known whether it trains."""
        if checkpointing.in_backward():
            # The gradients of a forward that runs again may be captured.
            return True
        trains = torch.is_grad_enabled() or checkpointing.in_segment()
        return trains and self._admits() != 0

    def _admits(self) -> int:
        # The gate does not see the optimizer's steps.
        self._gate.forget()
        return self._gate.admits()

    def take(self, name: str, engine_name: str, tensors: Sequence[Any], tp_size: int) -> None:
        layer = self._layers.get(name) or self._add(name)
        tensor_name = _NAMES[engine_name]
        call = self._call_of(layer, tensor_name)
        wanted = None if call is None else layer.wanted.get(tensor_name)
        kept = None if call is None or wanted is None else wanted.of(call.rules)
        if call is None or kept is None:
            return
        moment = call.moment
        if tensor_name == "weight" and layer.weight_at == moment.iteration:
            return
        if tensor_name == "weight" and self.sink.keeps(moment):
            layer.weight_at = moment.iteration
        attributes: dict[str, Any] = {"tp_size": tp_size}
        taken: list[Any] = []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not any(tensor is other for other in taken):
                taken.append(tensor)
                key = self._key(layer, tensor_name, tensor.dtype, call.rank)
                self.sink.offer(tensor, key, moment, attributes=attributes, take=kept.take, store=kept.store)

    def _add(self, name: str) -> _Layer:
        place, tensors = place_of(name), LINEAR.tensors
        target = Target(place.module, place.layer, LINEAR.component, tensors, frozenset(tensors))
        layer = self._layers[name] = _Layer(place, resolve(self._rules, [target]).wanted[0])
        return layer

    def _call_of(self, layer: _Layer, tensor_name: str) -> Optional[Call]:
        if placement(tensor_name)[0] == "backward":
            if tensor_name == "grad_output":
                layer.backward = layer.begin_backward()
            return layer.backward
        if checkpointing.in_backward():
            return None
        if tensor_name == "input":
            rules = self._admits()
            context = self.sink.context
            layer.forward = layer.begin(context.moment(), rules, context.bind()) if rules else None
        return layer.forward

    def _key(self, layer: _Layer, tensor_name: str, dtype: torch.dtype, rank: int) -> Key:
        key = layer.keys.get((tensor_name, dtype))
        if key is None or key.rank != rank:
            key = layer.place.key(LINEAR, tensor_name, self.sink.quant_type(dtype), rank)
            layer.keys[tensor_name, dtype] = key
        return key
