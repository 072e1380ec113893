"""The calls of linear layers whose three operands were captured, found among the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from capd.io.items import Item, Loaded
from capd_client.protocol.key import ORDINALS, Key, Moment
from capd_client.protocol.kinds import LINEAR

__all__ = ["Call", "Forward", "LinearCalls", "Operand"]

# Larger calls are left out: their operands and quantised operands would take about ten times this.
_MOST_NBYTES = 256 << 20
_OPERANDS = {("forward", "input"): "x", ("forward", "weight"): "weight", ("backward", "grad_output"): "dy"}
_LAYER = ("quant_type", "rank", "stack", "layer", "module")

Layer = tuple[Union[str, int, None], ...]
CallAt = tuple[Union[str, int, None], ...]
Read = Callable[[], NDArray[np.generic]]


class Operand(NamedTuple):
    """A captured operand.

    Attributes:
        name: The name in messages.
        read: Returns the elements, None if there are none of high precision.
        is_transposed: Whether it is a weight that is stored as [in_features, out_features].
        rows: The slice that was captured, and the leading dimensions of the whole; None for a whole tensor.
        reference: The place of the record in its run (`Item.reference`), if it can be read.
    """

    name: str
    read: Read | None
    dtype: str
    nbytes: int
    is_transposed: bool = False
    rows: tuple[object, ...] | None = None
    reference: tuple[str, str, str, int] | None = None

    def read_by(self, reader: Callable[[tuple[str, str, str, int]], Read]) -> Operand:
        """Return the operand read by `reader`, if it has a reference."""
        return self if self.reference is None else self._replace(read=reader(self.reference))


class Call(NamedTuple):
    """A call of a linear layer."""

    x: Operand
    weight: Operand
    dy: Operand

    @property
    def nbytes(self) -> int:
        """The bytes of all operands."""
        return sum(one.nbytes for one in self)

    @property
    def is_partial(self) -> bool:
        """Whether some tokens alone were captured, so that dW would be another sum."""
        return self.x.rows is not None

    @property
    def is_usable(self) -> bool:
        """Whether the operands are small enough, of high precision, and of the same tokens."""
        is_read = all(one.read is not None for one in self)
        return (
            is_read
            and self.nbytes <= _MOST_NBYTES
            and self.x.rows == self.dy.rows
            and self.weight.rows is None
        )


class Forward(NamedTuple):
    """The operands of a forward, with the key and the moment of its product. The tensor name of the product is "Y"."""

    key: Key
    moment: Moment
    x: Operand
    weight: Operand

    @property
    def nbytes(self) -> int:
        """The bytes of both operands."""
        return self.x.nbytes + self.weight.nbytes

    @property
    def is_usable(self) -> bool:
        """Whether the operands are small enough, whole, and of high precision."""
        is_read = self.x.read is not None and self.weight.read is not None
        return is_read and self.nbytes <= _MOST_NBYTES and self.weight.rows is None


class LinearCalls:
    """The captured operands of linear layers: some 500 bytes for each record, without elements. Not thread-safe."""

    _x: dict[Layer, dict[CallAt, Operand]]
    _dy: dict[tuple[Layer, CallAt], Operand]
    # A weight is captured once an iteration, or with each call if it is computed.
    _weights: dict[tuple[Layer, CallAt], Operand]
    _of_iteration: dict[tuple[Layer, CallAt], Operand]

    def __init__(self) -> None:
        self._x, self._dy, self._weights, self._of_iteration = {}, {}, {}, {}

    def add(self, item: Item, loaded: Loaded) -> None:
        """Add an item if it is an operand of a linear layer of a named module."""
        key, moment = loaded.key, loaded.moment
        name = _OPERANDS.get((key.operation, key.tensor_name))
        if name is None or key.component != LINEAR.component or not key.module:
            return
        layer, at = _layer(key), _at(moment)
        operand = _operand(item, loaded, name)
        if name == "x":
            self._x.setdefault(layer, {}).setdefault(at, operand)
        elif name == "dy":
            self._dy.setdefault((layer, at), operand)
        else:
            self._weights.setdefault((layer, at), operand)
            self._of_iteration.setdefault((layer, (moment.attempt, moment.iteration)), operand)

    def extend(self, other: LinearCalls) -> None:
        """Add later operands."""
        for layer, calls in other._x.items():
            own = self._x.setdefault(layer, {})
            for at, operand in calls.items():
                own.setdefault(at, operand)
        for name in ("_dy", "_weights", "_of_iteration"):
            held: dict[tuple[Layer, CallAt], Operand] = getattr(self, name)
            for place, operand in getattr(other, name).items():
                held.setdefault(place, operand)

    def read_by(self, reader: Callable[[tuple[str, str, str, int]], Read]) -> None:
        """Let `reader` read the operands that have a reference."""
        held: list[dict[Any, Operand]] = [*self._x.values(), self._dy, self._weights, self._of_iteration]
        for operands in held:
            for place, operand in operands.items():
                operands[place] = operand.read_by(reader)

    def by_module(self) -> list[list[Call]]:
        """Return the calls of each module whose three operands were captured."""
        found = [list(self._calls(layer)) for layer in self._x]
        return [calls for calls in found if calls]

    def forwards(self) -> Iterator[Forward]:
        """Yield the forward of each call whose input and weight were captured."""
        for layer, calls in self._x.items():
            quant_type, rank, stack, number, module = layer
            for at, x in calls.items():
                weight = self._weight(layer, at)
                if weight is not None:
                    key = Key(
                        quant_type=str(quant_type), rank=_whole(rank), tensor_name="Y", phase="post",
                        layer=None if number is None else _whole(number), layer_type=LINEAR.layer_type,
                        component=LINEAR.component, module=str(module), stack=str(stack),
                    )  # fmt: skip
                    yield Forward(key, Moment(**dict(zip(ORDINALS, at, strict=True))), x, weight)  # type: ignore[arg-type]

    def _calls(self, layer: Layer) -> Iterator[Call]:
        for at, x in self._x[layer].items():
            weight, dy = self._weight(layer, at), self._dy.get((layer, at))
            if weight is not None and dy is not None:
                yield Call(x, weight, dy)

    def _weight(self, layer: Layer, at: CallAt) -> Operand | None:
        attempt, iteration = at[ORDINALS.index("attempt")], at[ORDINALS.index("iteration")]
        return self._weights.get((layer, at)) or self._of_iteration.get((layer, (attempt, iteration)))


def _operand(item: Item, loaded: Loaded, name: str) -> Operand:
    is_operand = not str(loaded.attributes.get("operands", "")).startswith("input before")
    usable = loaded.no_source is None and (is_operand or name != "x")
    return Operand(
        item.name,
        item.read if usable else None,
        loaded.dtype,
        item.nbytes,
        is_transposed=name == "weight" and loaded.attributes.get("weight_layout") == "in_out",
        rows=_rows(loaded.metadata.get("slice")),
        reference=item.reference if usable else None,
    )


def _whole(value: str | int | None) -> int:
    return int(value or 0)


def _rows(note: Any) -> tuple[object, ...] | None:
    """Return what a record's note of its slice says of its rows (`capd_client.rules.slices`)."""
    if note is None:
        return None
    whole = note.get("of") if isinstance(note, dict) else None
    return (str(note), None) if not isinstance(whole, list) else (note.get("take"), tuple(whole[:-1]))


def _layer(key: Key) -> Layer:
    return tuple(getattr(key, name) for name in _LAYER)


def _at(moment: Moment) -> CallAt:
    return tuple(getattr(moment, name) for name in ORDINALS)
