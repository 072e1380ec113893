"""The calls of linear layers and attention in a run: operands and products, found among records without elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError, MissingParts, StoreError
from capd.io.items import Item, Loaded
from capd.io.sample import evenly
from capd.lab.sampling import SOURCE_DTYPES
from capd.products.captured.merging import At, Layer, Value, is_dtype, merged, together
from capd.store.logical.series import LogicalSeries
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import ORDINALS, Key, Moment
from capd_client.protocol.kinds import ATTENTION, GROUPED_LINEAR, LINEAR

__all__ = ["CapturedTensor", "ProductCall", "ProductCalls", "Value", "sampled"]

_TENSORS = {
    ("forward", "input"): "x", ("forward", "weight"): "w", ("backward", "grad_output"): "g",
    ("forward", "bias"): "bias", ("forward", "offsets"): "offsets", ("forward", "output"): "y",
    ("backward", "grad_input"): "dx", ("backward", "grad_weight"): "dw",
}  # fmt: skip
_OF_ATTENTION = {
    ("forward", "query"): "q", ("forward", "key"): "k", ("forward", "value"): "v", ("forward", "output"): "o",
    ("backward", "grad_output"): "do", ("backward", "grad_query"): "dq", ("backward", "grad_key"): "dk",
    ("backward", "grad_value"): "dv",
}  # fmt: skip
_TITLES = {"x": "input", "w": "weight", "g": "grad_output"}
_NAMES = {
    LINEAR.component: _TENSORS, GROUPED_LINEAR.component: _TENSORS, ATTENTION.component: _OF_ATTENTION,
}  # fmt: skip
# Captured once an iteration, or with each call if they are computed.
_OF_ITERATION = ("w", "bias")
_OF_LAYER = ("quant_type", "rank", "stack", "layer", "module")
_FUSED = "input before"
_ONE_RANK = "--rank takes what one rank has"
_NAMED = 4

T = TypeVar("T")


class CapturedTensor(NamedTuple):
    """A captured tensor of a call.

    Attributes:
        name: The name in messages.
        read: Returns the elements.
        no_operand: The reason why they are no operand of a product, "" if they are.
        dtype: The dtype.
        shape: The shape.
        nbytes: The memory that the elements take.
        is_transposed: Whether it is a weight that is stored as [in_features, out_features], or [experts, …] of them.
        rows: The note of the slice that was captured; None for a whole tensor.
        expert: The expert whose rows these are, if the layer's experts have one weight.
        is_whole: Whether it was put together from the parts of all ranks.
        emulation: The emulation that the record names, None if it names none.
        spread: Returns how far the ranks' copies of a whole tensor lie apart, relative to their largest magnitude.
        attributes, metadata: The record's. Those of a whole tensor are what its parts share, and of its first part.
    """

    name: str
    read: Callable[[], NDArray[np.generic]]
    no_operand: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    is_transposed: bool = False
    rows: str | None = None
    expert: int | None = None
    is_whole: bool = False
    emulation: str | None = None
    spread: Callable[[], float] | None = None
    attributes: Mapping[str, Any] = MappingProxyType({})
    metadata: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ProductCall:
    """A call of a linear layer or of attention.

    Attributes:
        place: The values of the fields of a call: those of its layer, and the ordinals of its moment.
        tensors: The captured tensors: x, w, g, bias, and the products y, dx, dw. Of attention q, k, v, do, and the
            products o, dq, dk, dv.
        is_grouped: Whether it multiplies the rows of several experts, each by its part of one weight.
    """

    place: Mapping[str, Value]
    tensors: Mapping[str, CapturedTensor]
    is_grouped: bool = False

    @property
    def name(self) -> str:
        """The name in messages: that of the input, or of the output gradient."""
        return next(
            self.tensors[name].name for name in ("x", "g", "q", *self.tensors) if name in self.tensors
        )

    @property
    def expert(self) -> int | None:
        """The expert that the records name."""
        return next((one.expert for one in self.tensors.values() if one.expert is not None), None)

    @property
    def emulation(self) -> str | None:
        """The emulation that the records name."""
        return next((one.emulation for one in self.tensors.values() if one.emulation is not None), None)

    @property
    def nbytes(self) -> int:
        """The bytes of all operands."""
        return sum(one.nbytes for name, one in self.tensors.items() if name in _TITLES)

    @property
    def is_partial(self) -> bool:
        """Whether some tokens alone were captured, so that dW would be another sum."""
        return any(one.rows is not None for name, one in self.tensors.items() if name in ("x", "g"))

    def reason(self, product: str, operands: Iterable[str]) -> str | None:
        """Return why a product of these operands cannot be replayed, None if it can."""
        for name in sorted(operands):
            one = self.tensors.get(name)
            if one is None:
                return f"{_TITLES[name]} was not captured"
            if one.no_operand:
                return f"{_TITLES[name]}: {one.no_operand}"
            if name == "w" and one.rows is not None:
                return "weight: a slice of it was captured"
        if self.is_grouped and (self.is_partial or ("offsets" not in self.tensors and self.expert is None)):
            return "which rows are of which expert is not known"
        if product == "dw" and self.is_partial:
            return "slices of tokens were captured, so dW would be another sum"
        return None


@dataclass(slots=True)
class ProductCalls:
    """The captured tensors of linear layers: some 700 bytes for each record. Not thread-safe."""

    _calls: dict[Layer, dict[At, dict[str, CapturedTensor]]] = field(default_factory=dict)
    _of_iteration: dict[tuple[Layer, At], dict[str, CapturedTensor]] = field(default_factory=dict)
    # The modules whose calls multiply the rows of several experts.
    _grouped: set[str] = field(default_factory=set)
    # Those whose quant type says more than the dtypes of their tensors.
    _labelled: set[Layer] = field(default_factory=set)

    def add(self, item: Item, loaded: Loaded) -> None:
        """Add an item if it is a tensor of a linear layer of a named module."""
        key, moment = loaded.key, loaded.moment
        name = _name_of(key)
        if name is None:
            return
        self._note_group(key)
        self._add(tuple(getattr(key, each) for each in _OF_LAYER), moment, name, _tensor(item, loaded, name))

    def add_whole(self, series: LogicalSeries) -> None:
        """Add a tensor that is put together from the parts of all ranks. Its rank is the place of its samples."""
        key = series.key
        name = _name_of(key)
        if name is None:
            return
        self._note_group(key)
        of_samples = ",".join(f"{dimension}={rank}" for dimension, rank in series.coordinates.items()) or None
        layer = tuple(of_samples if each == "rank" else getattr(key, each) for each in _OF_LAYER)
        # Words that pad a vocabulary take part in the products, and their gradients are not zero.
        series = series.uncropped()
        parts = dict(_first_metadata(series)) if name in ("y", "o") else {}
        for moment in series.moments:
            tensor = _whole_tensor(series, moment, name)
            tensor = tensor._replace(metadata=parts.get(_ordinals(moment), tensor.metadata))
            self._add(layer, moment, name, tensor)

    def _note_group(self, key: Key) -> None:
        if key.component == GROUPED_LINEAR.component:
            self._grouped.add(key.module)

    def _add(self, layer: Layer, moment: Moment, name: str, tensor: CapturedTensor) -> None:
        at = _ordinals(moment)
        if not is_dtype(layer[0], tensor.dtype):
            self._labelled.add(layer)
        if name in _OF_ITERATION:
            shared = self._of_iteration.setdefault((layer, _iteration(at)), {})
            shared.setdefault(name, tensor)
        # A weight alone makes no call.
        calls = self._calls.setdefault(layer, {})
        calls.setdefault(at, {}).setdefault(name, tensor)

    def by_module(self, some: Collection[str] = ("x", "g")) -> list[list[ProductCall]]:
        """Return the calls of each module that have one of these tensors: an input or an output gradient."""
        labels: dict[Layer, list[Value]] = {}
        for layer in self._calls.keys() - self._labelled:
            labels.setdefault(layer[2:], []).append(layer[0])
        found: list[list[ProductCall]] = []
        for group in together(self._calls, self._labelled):
            parts = list(merged(group, self._calls))
            for layer, calls in parts:
                # The weight of another run is not theirs.
                own = () if layer in self._labelled or len(parts) > 1 else labels[layer[2:]]
                found.append(list(self._calls_of(layer, calls, own, some)))
        return [calls for calls in found if calls]

    def _calls_of(
        self,
        layer: Layer,
        calls: Mapping[At, Mapping[str, CapturedTensor]],
        labels: Sequence[Value],
        some: Collection[str],
    ) -> Iterator[ProductCall]:
        """Yield the calls of a layer. labels: the quant types of layers whose weight is theirs, too."""
        for at, tensors in calls.items():
            if not tensors.keys().isdisjoint(some):
                shared: dict[str, CapturedTensor] = {}
                for label in (*sorted(map(str, labels)), layer[0]):
                    # A whole weight is that of all samples.
                    for rank in (None, layer[1]):
                        known = self._of_iteration.get(((label, rank, *layer[2:]), _iteration(at)), {})
                        shared = {**shared, **known}
                place = {**dict(zip(_OF_LAYER, layer, strict=True)), **dict(zip(ORDINALS, at, strict=True))}
                yield ProductCall(place, {**tensors, **shared, **tensors}, place["module"] in self._grouped)


def sampled(values: Sequence[T], share: float) -> list[T]:
    """Return a share of the values, each from the middle of its part, at least one."""
    return evenly(values, max(1, round(share * len(values))))


def _name_of(key: Key) -> str | None:
    """Return the name of a tensor of a named module in `ProductCall.tensors`."""
    names = _NAMES.get(key.component, {}) if key.module else {}
    return names.get((key.operation, key.tensor_name))


def _iteration(at: At) -> At:
    return at[ORDINALS.index("attempt")], at[ORDINALS.index("iteration")]


def _whole_tensor(series: LogicalSeries, moment: Moment, name: str) -> CapturedTensor:
    attributes = series.attributes
    reason = _reason(name, attributes)
    shape: tuple[int, ...] = ()
    if series.kept != "tensor":
        reason = "only its statistics were kept"
    elif "tensor_class" in attributes or series.dtype not in SOURCE_DTYPES:
        reason = "it is of no high precision"
    if not reason:
        try:
            shape = series.shape(moment)
        except MissingParts:
            reason = f"parts of it are missing: {_missing(series, moment)}; {_ONE_RANK}"
        except CapdError:
            reason = f"its parts do not fit together; {_ONE_RANK}"
    return CapturedTensor(
        series.name,
        partial(series.numpy, moment),
        reason,
        series.dtype,
        shape,
        prod(shape) * ITEM_NBYTES.get(series.dtype, 0),
        is_transposed=_is_transposed(name, attributes),
        is_whole=True,
        emulation=_emulation(attributes),
        spread=partial(series.spread_at, moment),
        attributes=attributes,
    )


def _missing(series: LogicalSeries, moment: Moment) -> str:
    """Return the coordinates of the missing parts and the ranks that stand there, the first four."""
    found = series.missing_at(moment)
    more = ", …" if len(found) > _NAMED else ""
    return ", ".join(map(str, found[:_NAMED])) + more


def _first_metadata(series: LogicalSeries) -> Iterator[tuple[At, Mapping[str, Any]]]:
    """Yield the moments of the first part with the metadata of its records. Damaged ones are left out."""
    part = series.series[0]
    for number, moment in zip(part.numbers, part.moments, strict=True):
        with suppress(StoreError):
            yield _ordinals(moment), part.record(number).metadata


def _ordinals(moment: Moment) -> At:
    return tuple(getattr(moment, each) for each in ORDINALS)


def _reason(name: str, attributes: Mapping[str, Any]) -> str:
    operands = str(attributes.get("operands", ""))
    return (
        f"a fused layer captured its {operands[:60]}" if name == "x" and operands.startswith(_FUSED) else ""
    )


def _emulation(attributes: Mapping[str, Any]) -> str | None:
    emulation = attributes.get("emulation")
    return emulation if isinstance(emulation, str) else None


def _is_transposed(name: str, attributes: Mapping[str, Any]) -> bool:
    return name in ("w", "dw") and str(attributes.get("weight_layout")) in ("in_out", "expert,in,out")


def _unread() -> NDArray[np.generic]:
    raise StoreError("only its statistics were kept")


def _tensor(item: Item, loaded: Loaded, name: str) -> CapturedTensor:
    reason = _reason(name, loaded.attributes) or loaded.no_source or ""
    # They are integers.
    reason = "" if name == "offsets" else reason
    note, expert = loaded.metadata.get("slice"), loaded.metadata.get("expert")
    return CapturedTensor(
        item.name,
        item.read or _unread,
        reason,
        loaded.dtype,
        tuple(loaded.shape),
        item.nbytes,
        is_transposed=_is_transposed(name, loaded.attributes),
        rows=None if note is None else str(note),
        expert=expert if type(expert) is int else None,
        emulation=_emulation(loaded.attributes),
        attributes=loaded.attributes,
        metadata=loaded.metadata,
    )
