"""The calls of linear layers whose three operands were captured, and the error of their products in each format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.io.items import UNREADABLE, Item, Loaded
from capd.store.read.series import tensor_of
from capd_client.protocol.key import ORDINALS, Key, Moment
from capd_client.protocol.kinds import LINEAR

if TYPE_CHECKING:
    import torch

__all__ = ["MOST_CALLS", "LinearCalls", "ProductErrors", "measure_products"]

MOST_CALLS = 32
"""The most calls that are measured, evenly over the modules."""
# Larger calls are left out: their operands and quantised operands would take about ten times this.
_MOST_NBYTES = 256 << 20
_WORK = 10
# Of all measured calls together: about 15 s of CPU for the five default formats.
_ALL_NBYTES = 128 << 20
_OPERANDS = {("forward", "input"): "x", ("forward", "weight"): "weight", ("backward", "grad_output"): "dy"}
_PLACE = ("quant_type", "rank", "stack", "layer", "module")

T = TypeVar("T")
Place = tuple[object, ...]


class _Operand(NamedTuple):
    # None if it has no elements of high precision.
    read: Callable[[], NDArray[np.generic]] | None
    dtype: str
    nbytes: int
    # Whether it is a weight that is stored as [in_features, out_features].
    is_transposed: bool


class _Call(NamedTuple):
    x: _Operand
    weight: _Operand
    dy: _Operand

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self)

    @property
    def is_usable(self) -> bool:
        return self.nbytes <= _MOST_NBYTES and all(one.read is not None for one in self)


class LinearCalls:
    """The captured operands of linear layers: some 500 bytes for each record, without elements. Not thread-safe."""

    def __init__(self) -> None:
        self._x: dict[Place, dict[Place, _Operand]] = {}
        self._dy: dict[tuple[Place, Place], _Operand] = {}
        # A weight is captured once an iteration, or with each call if it is computed.
        self._weights: dict[tuple[Place, Place], _Operand] = {}
        self._of_iteration: dict[tuple[Place, Place], _Operand] = {}

    def add(self, item: Item, loaded: Loaded) -> None:
        """Add an item if it is an operand of a linear layer of a named module."""
        key, moment = loaded.key, loaded.moment
        name = _OPERANDS.get((key.operation, key.tensor_name))
        if name is None or key.component != LINEAR.component or not key.module:
            return
        is_operand = not str(loaded.attributes.get("operands", "")).startswith("input before")
        usable = loaded.no_source is None and (is_operand or name != "x")
        transposed = name == "weight" and loaded.attributes.get("weight_layout") == "in_out"
        operand = _Operand(item.read if usable else None, loaded.dtype, item.nbytes, transposed)
        place, at = _place(key), _at(moment)
        if name == "x":
            self._x.setdefault(place, {}).setdefault(at, operand)
        elif name == "dy":
            self._dy.setdefault((place, at), operand)
        else:
            self._weights.setdefault((place, at), operand)
            self._of_iteration.setdefault((place, (moment.attempt, moment.iteration)), operand)

    def by_module(self) -> list[list[_Call]]:
        """Return the calls of each module whose three operands were captured."""
        found = [list(self._calls(place)) for place in self._x]
        return [calls for calls in found if calls]

    def _calls(self, place: Place) -> Iterator[_Call]:
        for at, x in self._x[place].items():
            attempt, iteration = at[ORDINALS.index("attempt")], at[ORDINALS.index("iteration")]
            weight = self._weights.get((place, at)) or self._of_iteration.get((place, (attempt, iteration)))
            dy = self._dy.get((place, at))
            if weight is not None and dy is not None:
                yield _Call(x, weight, dy)


def _place(key: Key) -> Place:
    return tuple(getattr(key, name) for name in _PLACE)


def _at(moment: Moment) -> Place:
    return tuple(getattr(moment, name) for name in ORDINALS)


@dataclass(slots=True)
class ProductErrors:
    """The errors of products.

    Attributes:
        calls: The calls whose three operands were captured.
        measured: The measured calls.
        left_out: The calls that cannot be measured: an operand is not of high precision, unreadable, or too large, or
            the shapes do not fit.
        errors: The errors by the format's label and the product's name (`capd.analyze.verdict.products`).
    """

    calls: int = 0
    measured: int = 0
    left_out: int = 0
    errors: dict[str, dict[str, Errors]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Mapping[str, Errors]] | None) -> None:
        """Add the errors of a call; None if it could not be measured."""
        self.left_out += found is None
        self.measured += found is not None
        for label, of_format in (found or {}).items():
            for name, errors in of_format.items():
                self.errors.setdefault(label, {}).setdefault(name, Errors()).add(errors)


def measure_products(calls: LinearCalls, choices: Sequence[FormatChoice], *, threads: int) -> ProductErrors:
    """Measure the products of at most MOST_CALLS calls, evenly over the modules; of large ones fewer, at least one."""
    modules = calls.by_module()
    usable = [own for each in modules if (own := [call for call in each if call.is_usable])]
    found = ProductErrors(calls=sum(map(len, modules)))
    found.left_out = found.calls - sum(map(len, usable))
    with worker_threads(threads, "products") as pool:

        def begin(call: _Call) -> Future[Mapping[str, Mapping[str, Errors]] | None]:
            return pool.submit(_measured, call, choices)

        for _, future in ahead(_chosen(usable), begin, lambda call: _WORK * call.nbytes, AHEAD_NBYTES):
            found.add(future.result())
    return found


def _chosen(modules: Sequence[Sequence[_Call]]) -> list[_Call]:
    largest = max((call.nbytes for calls in modules for call in calls), default=1)
    most = max(1, min(MOST_CALLS, _ALL_NBYTES // max(1, largest)))
    some = _evenly(modules, most)
    each, more = divmod(most, max(1, len(some)))
    return [call for place, calls in enumerate(some) for call in _evenly(calls, each + (place < more))]


def _evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most so many values, each from the middle of its share."""
    number = min(most, len(values))
    return [values[(2 * place + 1) * len(values) // (2 * number)] for place in range(number)]


def _matrix(bits: NDArray[np.generic], operand: _Operand) -> torch.Tensor:
    """Return an operand with all of its axes but the last one as rows; a weight as [out_features, in_features]."""
    values = tensor_of(bits, operand.dtype)
    if values.ndim != 2:
        values = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    return values.t() if operand.is_transposed else values


def _measured(call: _Call, choices: Sequence[FormatChoice]) -> Mapping[str, Mapping[str, Errors]] | None:
    # The import needs torch, which a report without formats does not load.
    from capd.analyze.verdict.products import Operands, product_errors

    try:
        x, weight, dy = (_matrix(one.read(), one) for one in call if one.read is not None)
        operands = Operands(x, weight, dy)
        return product_errors(operands, choices) if operands.fit else None
    except UNREADABLE:
        return None
