"""What is kept of one product's tensors, and the keys and attributes under which they are handed to the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from capd_client.calls import Call
from capd_client.gate import Gate
from capd_client.key import Key
from capd_client.kinds import placement
from capd_client.naming import Place
from capd_client.rules import Kept, Wanted, rules_of
from capd_client.sink import Sink
from capd_client.sites import Site

__all__ = ["Offers"]


class Offers:
    """Those of one tap.

    tensors: names of those that are captured, in some step. rules: that want any of them, as bits.
    """

    __slots__ = (
        "_attributes", "_common", "_computed", "_context", "_kept", "_keys", "_kind", "_lacks", "_of_tensor",
        "_parameter_at", "_place", "_sink", "_state", "_wanted", "rules", "tensors",
    )  # fmt: skip

    def __init__(
        self, site: Site, place: Place, wanted: Mapping[str, Wanted], sink: Sink, gate: Gate
    ) -> None:
        self._kind = site.kind
        self._place = place
        self._sink = sink
        self._context = gate.context
        self._computed = site.computed
        self._state = site.state
        self._common = site.attributes
        self._of_tensor = dict(site.of_tensor)
        self._lacks = frozenset(name for name, _ in site.lacks)
        self._wanted: Mapping[str, Wanted] = {}  # by tensor name
        self.tensors: frozenset[str] = frozenset()
        self.rules = 0
        self.want(wanted)
        self._attributes: dict[tuple[str, Optional[torch.dtype]], Optional[dict[str, Any]]] = {}
        self._keys: dict[tuple[str, torch.dtype], Key] = {}
        self._parameter_at = (-1, False)  # the iteration whose parameter is captured, and whether all of it

    def want(self, wanted: Mapping[str, Wanted]) -> None:
        """Capture these tensors from now on, by their names."""
        had = {name: one for name, one in wanted.items() if name not in self._lacks}
        self._wanted, self.tensors, self.rules = had, frozenset(had), rules_of(had)
        self._kept: dict[
            tuple[str, int], Optional[Kept]
        ] = {}  # what is wanted, by tensor name and open rules

    def wanted(self, tensor_name: str) -> Wanted:
        """What is wanted of one of `tensors`."""
        return self._wanted[tensor_name]

    def kept(self, tensor_name: str, call: Call) -> Optional[Kept]:
        """What the rules of this call want of a tensor; None: nothing."""
        found, asked = self._kept, (tensor_name, call.rules)
        try:
            return found[asked]
        except KeyError:
            wanted = self._wanted.get(tensor_name)
            kept = found[asked] = None if wanted is None else wanted.of(call.rules)
            return kept

    def shape_of(self, tensor_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept of a tensor of this shape."""
        wanted = self._wanted[tensor_name]
        kept = wanted.of(wanted.mask)
        return shape if kept is None or kept.take is None else kept.take.shape_of(shape)

    def parameter(
        self, parameter: Tensor, module: Optional[nn.Module], call: Call, cast_to: Optional[torch.dtype]
    ) -> None:
        """Capture the parameter that the call uses, once per iteration; one that is computed, with every call."""
        kept, iteration = self.kept(self._kind.parameter, call), call.moment.iteration
        if kept is None:
            return
        whole = kept.store != "stats"
        if self._parameter_at in ((iteration, True), (iteration, whole)):
            return  # otherwise another rule has kept its statistics alone, if anything
        # Otherwise it comes with the first call that is kept.
        if not self._computed and self._sink.keeps(call.moment):
            self._parameter_at = (iteration, whole)
        self._offer_parameter(parameter, module, call, cast_to)

    def _offer_parameter(
        self, parameter: Tensor, module: Optional[nn.Module], call: Call, cast_to: Optional[torch.dtype]
    ) -> None:
        name = self._kind.parameter
        if self._state is None or module is None:
            self.tensor(parameter, name, call, cast_to)
            return
        state = self._state(module)
        attributes = {**(self._attributes_of(name, None) or {}), **state.attributes}
        self.tensor(parameter, name, call, None, attributes)
        for suffix, tensor in state.tensors.items():
            self.tensor(tensor, f"{name}.{suffix}", call, None, attributes, part_of=name)

    def tensor(
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
        rank = self._context.bind()
        key = self._keys.get((tensor_name, dtype))
        if key is None or key.rank != rank:
            operation, phase = placement(tensor_name)
            key = self._keys[tensor_name, dtype] = Key(
                quant_type=self._sink.quant_type(dtype), rank=rank, tensor_name=tensor_name,
                layer=self._place.layer, phase=phase, layer_type=self._kind.layer_type, operation=operation,
                component=self._kind.component, module=self._place.module, stack=self._place.stack,
            )  # fmt: skip
        return key
