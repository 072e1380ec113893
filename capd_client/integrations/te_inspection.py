"""What TransformerEngine's inspection hands on (capd_client/te_features): the operands of its products, cast or not.

It is called for a layer's tensors one by one, without a word of the call that they belong to: in the forward the
activation comes first, in the backward the gradient. A layer's backwards come in the order of their micro-batches, and
within a micro-batch the last call is the first: so the calls of a layer wait in a queue for their backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import msgspec
import torch

from capd_client import recompute
from capd_client.api import session
from capd_client.gate import Gate
from capd_client.key import Key, Moment
from capd_client.kinds import LINEAR, placement
from capd_client.naming import Place, place_of
from capd_client.select import Ranges
from capd_client.slicing import Slice, parse_slices
from capd_client.taps import Sink

__all__ = ["begin", "inspected", "inspects", "te_features", "wants"]

_NAMES = {
    "activation": "input", "weight": "weight", "output": "output",
    "gradient": "grad_output", "dgrad": "grad_input", "wgrad": "grad_weight",
}  # fmt: skip

_begun = False
_inspection: Optional[_Inspection] = None


def te_features() -> str:
    """The directory for `nvdlfw_inspect.api.initialize(feature_dirs=[..., te_features()])`, with CapdCapture in it."""
    return str(Path(__file__).parent.parent / "te_features")


def begin() -> None:
    """TransformerEngine has loaded the feature: from now on it captures the linears, and `watch` does not."""
    global _begun
    _begun = True


def inspects() -> bool:
    """Whether the feature was loaded, and so the linears are captured by it."""
    return _begun


def wants() -> bool:
    """Whether the iteration under way is captured. Never raises."""
    return _guarded(lambda inspection: inspection.wants()) or False


def inspected(layer: str, tensor_name: str, tensors: Sequence[Any], tp_size: int) -> None:
    """A tensor of a layer, before and after its cast, as far as they exist. Never raises."""
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
    """One layer: its keys, and the calls whose backward is to come, those of one micro-batch in one list."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.keys: dict[tuple[str, torch.dtype], Key] = {}
        self.iteration = -1
        self.calls: dict[int, int] = {}  # how many there were in each micro-batch
        self.waiting: dict[int, list[Moment]] = {}
        self.forward: Optional[Moment] = None
        self.backward: Optional[Moment] = None
        self.weight_at = -1

    def begin(self, moment: Moment) -> Moment:
        """A call begins: the first tensor of its forward is here."""
        if moment.iteration != self.iteration:
            self.iteration = moment.iteration
            self.calls, self.waiting = {}, {}
        number = self.calls.get(moment.micro_batch, 0)
        self.calls[moment.micro_batch] = number + 1
        moment = msgspec.structs.replace(moment, call=number)
        self.waiting.setdefault(moment.micro_batch, []).append(moment)
        return moment

    def begin_backward(self) -> Optional[Moment]:
        """The backward of a call begins: the one that it belongs to, None where its forward was not captured."""
        if not self.waiting:
            return None
        first = next(iter(self.waiting))
        moment = self.waiting[first].pop()
        if not self.waiting[first]:
            del self.waiting[first]
        return moment


class _Inspection:
    """The layers of one session."""

    def __init__(self, sink: Sink) -> None:
        config = sink.config
        self.sink = sink
        self._gate = Gate(
            sink.context,
            Ranges(config.steps),
            micro_batches=None if config.micro_batches == "all" else Ranges(config.micro_batches),
            ranks=None if config.ranks == "all" else Ranges(config.ranks),
        )
        self._slices: dict[str, Slice] = parse_slices(config.slice or {})
        self._layers: dict[str, _Layer] = {}

    def wants(self) -> bool:
        """Asked in front of a forward, where it is still known whether that trains."""
        if recompute.in_backward():
            return True  # for the gradients of what is run again
        trains = torch.is_grad_enabled() or recompute.in_segment()
        return trains and self._admits()

    def _admits(self) -> bool:
        self._gate.forget()  # it hears of no optimizer
        return self._gate.admits()

    def take(self, name: str, engine_name: str, tensors: Sequence[Any], tp_size: int) -> None:
        layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = _Layer(place_of(name))
        tensor_name = _NAMES[engine_name]
        moment = self._moment_of(layer, tensor_name)
        if moment is None or (tensor_name == "weight" and layer.weight_at == moment.iteration):
            return
        if tensor_name == "weight" and self.sink.keeps(moment):
            layer.weight_at = moment.iteration
        attributes: dict[str, Any] = {"tp_size": tp_size}
        taken: list[Any] = []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not any(tensor is other for other in taken):
                taken.append(tensor)
                key = self._key(layer, tensor_name, tensor.dtype)
                self.sink.offer(
                    tensor, key, moment, attributes=attributes, take=self._slices.get(tensor_name)
                )

    def _moment_of(self, layer: _Layer, tensor_name: str) -> Optional[Moment]:
        if placement(tensor_name)[0] == "backward":
            if tensor_name == "grad_output":
                layer.backward = layer.begin_backward()
            return layer.backward
        if recompute.in_backward():
            return None
        if tensor_name == "input":
            layer.forward = layer.begin(self.sink.context.moment()) if self._admits() else None
        return layer.forward

    def _key(self, layer: _Layer, tensor_name: str, dtype: torch.dtype) -> Key:
        rank = self.sink.context.bind()
        key = layer.keys.get((tensor_name, dtype))
        if key is None or key.rank != rank:
            operation, phase = placement(tensor_name)
            key = layer.keys[tensor_name, dtype] = Key(
                quant_type=self.sink.quant_type(dtype), rank=rank, tensor_name=tensor_name,
                layer=layer.place.layer, phase=phase, layer_type=LINEAR.layer_type, operation=operation,
                component=LINEAR.component, module=layer.place.module, stack=layer.place.stack,
            )  # fmt: skip
        return key
