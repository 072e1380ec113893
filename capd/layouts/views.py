"""What is compared with what: the same tensor in two runs, cut and turned until both have one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.errors import ConfigError, ContradictoryParts
from capd.layouts.names import Counterpart, MapSide, NameMap
from capd.layouts.whole_run import Occasion, TensorName, WholeRun
from capd.store.logical.positions import QkvHeads

__all__ = ["Aspect", "Aspects", "Cut", "Values", "aspects_of"]

Values = NDArray[Any]
_PIECES = {"qkv": ("query", "key", "value"), "gated": ("gate", "up")}
_ROWS = {
    "weight": 0, "bias": 0, "grad_weight": 0, "grad_bias": 0, "main_grad": 0, "output": -1, "grad_output": -1,
}  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """What one run contributes to a comparison: tensors to be added up, and how each is cut and turned.

    Attributes:
        names: The tensors.
        rows: The rows to take along `axis`, as `(split, piece)`; None for all.
        axis: The axis of the rows.
        order: The order of the first axes of activations.
        rotary: Whether the rows of each head are in rotary pairs, to be put into halves.
        heads: The heads of the fused projection; None without one.
    """

    names: tuple[TensorName, ...]
    rows: tuple[str, int] | None = None
    axis: int = 0
    order: str = ""
    rotary: bool = False
    heads: QkvHeads | None = None

    def values(self, run: WholeRun, occasions: Sequence[Occasion]) -> Values:
        """Return the tensor of a run, added up over `names` and `occasions`. Raises as `LogicalSeries.numpy`."""
        terms = [self._changed(run, name, at) for name in self.names for at in occasions]
        found = terms[0]
        for term in terms[1:]:
            if found.shape != term.shape:
                shapes = f"{list(found.shape)} and {list(term.shape)}"
                raise ContradictoryParts(f"{self.names[0]}: tensors of shapes {shapes} cannot be added up")
            found = found.astype(np.float64) + term
        return found

    def _changed(self, run: WholeRun, name: TensorName, at: Occasion) -> Values:
        values = run.values(name, at)
        if self.rows is not None:
            rows = _positions(self.rows, self.heads, name, values.shape[self.axis])
            values = np.take(values, rows, axis=self.axis)
        if self.rotary and self.heads is not None and values.shape[self.axis] % self.heads.size == 0:
            values = np.take(values, _in_halves(values.shape[self.axis], self.heads.size), axis=self.axis)
        if self.order == "sbh" and values.ndim == 3 and not name.is_of_parameter:
            values = values.swapaxes(0, 1)
        return values


def _positions(rows: tuple[str, int], heads: QkvHeads | None, name: TensorName, length: int) -> Any:
    """Return the rows of a piece of a fused tensor with `length` rows."""
    _, piece = rows
    if heads is None:
        if length % 2:
            raise ContradictoryParts(f"{name} has {length} rows, which are not two halves")
        return np.arange(length).reshape(2, -1)[piece]
    if heads.rows != length:
        raise ContradictoryParts(f"{name} has {length} rows, and its heads have {heads.rows}")
    return heads.fused_rows()[piece]


def _heads_of(run: WholeRun, name: TensorName) -> QkvHeads:
    """Return the heads of a fused projection. Raises ContradictoryParts without its attributes."""
    told = run.series(name, run.occasions(name)[0]).attributes
    numbers = [
        number for what in ("heads", "groups", "head_dim") if type(number := told.get(f"qkv_{what}")) is int
    ]
    if len(numbers) < 3:
        raise ContradictoryParts(
            f"{name}: no attribute tells its heads (qkv_heads, qkv_groups, qkv_head_dim)"
        )
    return QkvHeads(*numbers)


def _in_halves(length: int, head: int) -> Values:
    """Return the rows that put rotary pairs (real, imaginary, real, …) of each head into two halves."""
    at: Values = np.arange(length).reshape(-1, head // 2, 2)
    return at.swapaxes(1, 2).reshape(-1)


class Aspect(NamedTuple):
    """One comparison: the same thing in the reference and in the other run.

    Attributes:
        name: The tensor of the reference.
        piece: The piece of a fused tensor, "" for all of it.
        reference, other: Where it is in each run.
    """

    name: TensorName
    piece: str
    reference: Cut
    other: Cut

    @property
    def text(self) -> str:
        """The name to show."""
        return f"{self.name}[{self.piece}]" if self.piece else str(self.name)


class Aspects(NamedTuple):
    """All comparisons of two runs, and the tensors that have no counterpart."""

    found: list[Aspect]
    only_reference: list[TensorName]
    only_other: list[TensorName]


def aspects_of(reference: WholeRun, other: WholeRun, names: NameMap | None) -> Aspects:
    """Return what can be compared. With a map, either run may be of its left framework.

    Raises:
        ConfigError: Two modules of the left framework are one of the right.
        ContradictoryParts: No attribute tells the heads of a fused projection.
    """
    flipped = names is not None and not names.is_left(reference.modules, other.modules)
    left, right = (other, reference) if flipped else (reference, other)
    found: list[Aspect] = []
    owners: dict[TensorName, TensorName] = {}
    lonely: list[TensorName] = []
    for name in left.names:
        pairs = _pairs(name, left, right, names)
        if not pairs:
            lonely.append(name)
        for piece, there, here in pairs:
            for their in there.names:
                if owners.setdefault(their, name) != name:
                    raise ConfigError(
                        f"--map: {owners[their].module} and {name.module} of {left.source} are both {their.module} of "
                        f"{right.source}; a module has one counterpart"
                    )
            one, two = (there, here) if flipped else (here, there)
            found.append(Aspect(one.names[0], piece, one, two))
    rest = [name for name in right.names if name not in owners]
    return Aspects(found, rest, lonely) if flipped else Aspects(found, lonely, rest)


def _pairs(
    name: TensorName, left: WholeRun, right: WholeRun, names: NameMap | None
) -> list[tuple[str, Cut, Cut]]:
    """Return piece, right cut and left cut of a left tensor, by the first counterpart that the right run has."""
    if names is None:
        return [("", Cut((name,)), Cut((name,)))] if name in right else []
    for known in names.counterparts(name.module):
        if right.modules.isdisjoint(known.right):
            continue
        heads = _heads_of(left, name) if known.split == "qkv" else None
        pairs = _mapped(name, known, (names.left, names.right), heads)
        if found := [pair for pair in pairs if all(one in right for one in pair[1].names)]:
            return found
    return []


def _mapped(
    name: TensorName, known: Counterpart, sides: tuple[MapSide, MapSide], heads: QkvHeads | None
) -> Iterator[tuple[str, Cut, Cut]]:
    """Yield piece, right cut and left cut of a left tensor with a counterpart."""
    left, right = sides
    theirs = tuple(name._replace(module=module) for module in known.right)
    whole = Cut((name,), order=left.order)
    if name.tensor == "input" or (known.split == "none" and name.tensor in _ROWS):
        yield "", Cut(theirs[:1], order=right.order), whole
    elif name.tensor == "grad_input":
        yield "", Cut(theirs, order=right.order), whole
    elif known.split != "none" and name.tensor in _ROWS:
        axis, pieces = _ROWS[name.tensor], _PIECES[known.split]
        fused = len(theirs) < len(pieces)
        for number, piece in enumerate(pieces):
            # Values have no rotary embedding.
            turned = heads is not None and left.rotary != right.rotary and piece != "value"
            rows = (known.split, number)
            yield (
                piece,
                Cut(
                    theirs if fused else theirs[number : number + 1], rows if fused else None, axis, right.order,
                    turned and right.rotary == "interleaved", heads,
                ),
                Cut((name,), rows, axis, left.order, turned and left.rotary == "interleaved", heads),
            )  # fmt: skip
