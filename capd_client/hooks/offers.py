"""The tensors of one product on their way to the session: the rules' parts of them, their keys and attributes."""

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
from capd_client.rules.resolve import Kept, Wanted, rules_of
from capd_client.tensors import emulation_label

__all__ = ["Offers"]


class _Named(NamedTuple):
    """The key and the attributes of all tensors of one name, dtype and rank."""

    key: Key
    # The session recognises the dict by identity, so all these tensors share one.
    attributes: dict[str, Any]


class _KeptByRules(dict[int, dict[str, Kept]]):
    """A table from the rules that captured a call, as bits, to the kept parts of its tensors, by name.

    Entries are computed when they are first asked for.
    """

    def __init__(self, wanted: Mapping[str, Wanted]) -> None:
        super().__init__()
        self._wanted = wanted

    def __missing__(self, rules: int) -> dict[str, Kept]:
        found = {name: wanted.of(rules) for name, wanted in self._wanted.items()}
        self[rules] = {name: kept for name, kept in found.items() if kept is not None}
        return self[rules]


class Offers:
    """The tensors of one tap, as they are offered to the session.

    Attributes:
        tensors: The names of the tensors that are captured in some step.
        rules: The rules that want any of these tensors, as bits.
        kept: The parts that each call keeps: `kept[call.rules]`, by tensor name. Every capture asks several times, so
            the lookup makes no Python call.
    """

    __slots__ = (
        "_common", "_computed", "_kind", "_lacks", "_module", "_named", "_of_tensor", "_parameter_at", "_place",
        "_sink", "_state", "_tied", "_wanted", "kept", "rules", "tensors",
    )  # fmt: skip

    def __init__(self, site: Site, place: Place, wanted: Mapping[str, Wanted], sink: Sink) -> None:
        self._kind = site.kind
        self._module = weakref.ref(site.module)
        self._place = place
        self._sink = sink
        self._computed = site.computed
        self._state = site.state
        self._tied = site.tied
        self._common = site.attributes
        self._of_tensor = dict(site.of_tensor)
        self._lacks = frozenset(name for name, _ in site.lacks)
        # By tensor name.
        self._wanted: Mapping[str, Wanted] = {}
        self.kept: Mapping[int, Mapping[str, Kept]] = {}
        self.tensors: frozenset[str] = frozenset()
        self.rules = 0
        self.want(wanted)
        # By tensor name, dtype, the dtype that autocast casts it to, and rank.
        self._named: dict[tuple[str, torch.dtype, Optional[torch.dtype], int], _Named] = {}
        # The last iteration whose parameter was captured, and whether more than its statistics was.
        self._parameter_at = (-1, False)

    def want(self, wanted: Mapping[str, Wanted]) -> None:
        """Capture these tensors from now on. `wanted`: by tensor name."""
        had = {name: one for name, one in wanted.items() if name not in self._lacks}
        self._wanted, self.tensors, self.rules = had, frozenset(had), rules_of(had)
        self.kept = _KeptByRules(had)

    def wanted(self, tensor_name: str) -> Wanted:
        """Return what the rules want of one of `tensors`."""
        return self._wanted[tensor_name]

    def forget_names(self) -> None:
        """Forget the keys and attributes. The next capture computes them again."""
        self._named.clear()

    def shape_of(self, tensor_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the kept part of a tensor of this shape."""
        wanted = self._wanted[tensor_name]
        kept = wanted.of(wanted.mask)
        return shape if kept is None or kept.take is None else kept.take.shape_of(shape)

    def parameter(
        self, parameter: Tensor, module: Optional[nn.Module], call: Call, cast_to: Optional[torch.dtype]
    ) -> None:
        """Capture the call's parameter once per iteration. A computed parameter is captured with every call.

        Args:
            parameter: The parameter.
            module: The module that holds it; None if the module is gone.
            call: The call.
            cast_to: The dtype that autocast gives the parameter; None without autocast.
        """
        kept, iteration = self.kept[call.rules].get(self._kind.parameter), call.moment.iteration
        if kept is None:
            return
        whole = kept.store != "stats"
        # A rule that wants the tensor captures it even after another rule has captured its statistics.
        if self._parameter_at in ((iteration, True), (iteration, whole)):
            return
        # A parameter whose call is not kept is captured with the next call.
        if not self._computed and self._sink.keeps(call.moment):
            self._parameter_at = (iteration, whole)
        if self._state is None or module is None:
            self.tensor(parameter, self._kind.parameter, call, cast_to)
        else:
            self._quantised(parameter, self._state(module), call, kept)

    def _quantised(self, parameter: Tensor, state: QuantisedState, call: Call, kept: Kept) -> None:
        """Capture a quantised parameter and its state. A slice applies to the parameter, never to the state."""
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
        """Capture a tensor of the call if it is wanted.

        Args:
            tensor: The tensor.
            tensor_name: Its name in the kind of the product.
            call: The call.
            cast_to: The dtype that autocast gives the tensor; None without autocast.
            moment: The moment of the record. Default: the call's.
        """
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
        found = {**dict(own), emulation_label.ATTRIBUTE: emulation}
        is_gradient = tensor_name == f"grad_{self._kind.parameter}"
        if is_gradient and self._tied is not None and module is not None and self._tied(module):
            found["tied"] = True
        if (perturbed := self._sink.config.perturb) is not None:
            found["perturb"] = perturbed
        return found

    def _name(
        self, tensor_name: str, dtype: torch.dtype, cast_to: Optional[torch.dtype], rank: int
    ) -> _Named:
        asked = (tensor_name, dtype, cast_to, rank)
        if asked in self._named:
            return self._named[asked]
        key = self._place.key(self._kind, tensor_name, self._sink.quant_type(cast_to or dtype), rank)
        attributes = self._attributes_of(tensor_name)
        if cast_to is not None:
            attributes["cast_from"] = str(dtype).removeprefix("torch.")
        found = self._named[asked] = _Named(key, attributes)
        return found
