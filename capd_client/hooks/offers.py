"""What is kept of one product's tensors, and the keys and attributes under which they are handed to the session."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from capd_client.hooks.calls import Call
from capd_client.hooks.module_names import Place
from capd_client.hooks.sink import Sink
from capd_client.hooks.sites import QuantisedState, Site
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.kinds import placement
from capd_client.rules.resolve import Kept, Wanted, rules_of
from capd_client.tensors import emulation_label

__all__ = ["Offers"]


class _Named(NamedTuple):
    """What a tensor of one name, dtype and rank is handed over as."""

    key: Key
    attributes: dict[str, Any]  # one dict for all of them: the session knows it again


class _KeptByRules(dict[int, dict[str, Kept]]):
    """By the rules that captured a call, as bits: what they want of each tensor, by name. Filled in as it is asked."""

    def __init__(self, wanted: Mapping[str, Wanted]) -> None:
        super().__init__()
        self._wanted = wanted

    def __missing__(self, rules: int) -> dict[str, Kept]:
        found = {name: wanted.of(rules) for name, wanted in self._wanted.items()}
        self[rules] = {name: kept for name, kept in found.items() if kept is not None}
        return self[rules]


class Offers:
    """The tensors of one tap, as they are offered to the session.

    tensors: names of the tensors that are captured, in some step. rules: those that want any of them, as bits. kept:
    what each call is to keep: `kept[call.rules]` is asked several times per capture, and costs no call.
    """

    __slots__ = (
        "_common", "_computed", "_kind", "_lacks", "_module", "_named", "_of_tensor", "_parameter_at", "_place",
        "_sink", "_state", "_wanted", "kept", "rules", "tensors",
    )  # fmt: skip

    def __init__(self, site: Site, place: Place, wanted: Mapping[str, Wanted], sink: Sink) -> None:
        self._kind = site.kind
        self._module = weakref.ref(site.module)
        self._place = place
        self._sink = sink
        self._computed = site.computed
        self._state = site.state
        self._common = site.attributes
        self._of_tensor = dict(site.of_tensor)
        self._lacks = frozenset(name for name, _ in site.lacks)
        self._wanted: Mapping[str, Wanted] = {}  # by tensor name
        self.kept: Mapping[int, Mapping[str, Kept]] = {}
        self.tensors: frozenset[str] = frozenset()
        self.rules = 0
        self.want(wanted)
        # by name, dtype, dtype that it is cast to, and rank
        self._named: dict[tuple[str, torch.dtype, Optional[torch.dtype], int], _Named] = {}
        self._parameter_at = (-1, False)  # the iteration whose parameter is captured, and whether all of it

    def want(self, wanted: Mapping[str, Wanted]) -> None:
        """Capture these tensors from now on, by their names."""
        had = {name: one for name, one in wanted.items() if name not in self._lacks}
        self._wanted, self.tensors, self.rules = had, frozenset(had), rules_of(had)
        self.kept = _KeptByRules(had)

    def wanted(self, tensor_name: str) -> Wanted:
        """What is wanted of one of `tensors`."""
        return self._wanted[tensor_name]

    def forget_names(self) -> None:
        """Make the keys and attributes of the tensors again when they are asked for next."""
        self._named.clear()

    def shape_of(self, tensor_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept of a tensor of this shape."""
        wanted = self._wanted[tensor_name]
        kept = wanted.of(wanted.mask)
        return shape if kept is None or kept.take is None else kept.take.shape_of(shape)

    def parameter(
        self, parameter: Tensor, module: Optional[nn.Module], call: Call, cast_to: Optional[torch.dtype]
    ) -> None:
        """Capture the parameter that the call uses, once per iteration; one that is computed, with every call."""
        kept, iteration = self.kept[call.rules].get(self._kind.parameter), call.moment.iteration
        if kept is None:
            return
        whole = kept.store != "stats"
        if self._parameter_at in ((iteration, True), (iteration, whole)):
            return  # otherwise another rule has kept its statistics alone, if anything
        # Otherwise it comes with the first call that is kept.
        if not self._computed and self._sink.keeps(call.moment):
            self._parameter_at = (iteration, whole)
        if self._state is None or module is None:
            self.tensor(parameter, self._kind.parameter, call, cast_to)
        else:
            self._quantised(parameter, self._state(module), call, kept)

    def _quantised(self, parameter: Tensor, state: QuantisedState, call: Call, kept: Kept) -> None:
        """Capture a quantised parameter, and what it is read by: whole, whatever is kept of the parameter."""
        name = self._kind.parameter
        tensors = {
            name: parameter,
            **{f"{name}.{suffix}": tensor for suffix, tensor in state.tensors.items()},
        }
        attributes = {**self._attributes_of(name), **state.attributes}
        for tensor_name, tensor in tensors.items():
            self._sink.offer(
                tensor,
                self._name(tensor_name, tensor.dtype, None, call.rank).key,
                call.moment,
                attributes=attributes,
                metadata=call.metadata,
                take=kept.take if tensor is parameter else None,
                store=kept.store,
            )

    def tensor(
        self,
        tensor: Tensor,
        tensor_name: str,
        call: Call,
        cast_to: Optional[torch.dtype] = None,
        moment: Optional[Moment] = None,
    ) -> None:
        """Capture a tensor if it is wanted; `moment`: other than the call's."""
        kept = self.kept[call.rules].get(tensor_name)
        if kept is None:
            return
        key, attributes = self._named.get((tensor_name, tensor.dtype, cast_to, call.rank)) or self._name(
            tensor_name, tensor.dtype, cast_to, call.rank
        )
        self._sink.offer(
            tensor,
            key,
            call.moment if moment is None else moment,
            cast_to=cast_to,
            attributes=attributes,
            metadata=call.metadata,
            take=kept.take,
            store=kept.store,
        )

    def _attributes_of(self, tensor_name: str) -> dict[str, Any]:
        module = self._module()
        emulation = emulation_label.NONE if module is None else emulation_label.text_of(module)
        own = (*self._common, *self._of_tensor.get(tensor_name, ()))
        return {**dict(own), emulation_label.ATTRIBUTE: emulation}

    def _name(
        self, tensor_name: str, dtype: torch.dtype, cast_to: Optional[torch.dtype], rank: int
    ) -> _Named:
        asked = (tensor_name, dtype, cast_to, rank)
        if asked in self._named:
            return self._named[asked]
        operation, phase = placement(tensor_name)
        key = Key(
            quant_type=self._sink.quant_type(cast_to or dtype), rank=rank, tensor_name=tensor_name,
            layer=self._place.layer, phase=phase, layer_type=self._kind.layer_type, operation=operation,
            component=self._kind.component, module=self._place.module, stack=self._place.stack,
        )  # fmt: skip
        attributes = self._attributes_of(tensor_name)
        if cast_to is not None:
            attributes["cast_from"] = str(dtype).removeprefix("torch.")
        found = self._named[asked] = _Named(key, attributes)
        return found
