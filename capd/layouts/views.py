"""What is compared with what: the same tensor in two runs, cut and turned until both have one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.errors import ContradictoryParts
from capd.layouts.names import NameMap
from capd.layouts.whole_run import Occasion, TensorName, WholeRun
from capd.store.logical.positions import QkvHeads

__all__ = ["Aspect", "Aspects", "Cut", "Values", "aspects_of", "heads_of"]

Values = NDArray[Any]
_PIECES = {"qkv": ("query", "key", "value"), "gated": ("gate", "up")}
_ROWS = {"weight": 0, "bias": 0, "grad_weight": 0, "grad_bias": 0, "output": -1, "grad_output": -1}


@dataclass(frozen=True)
class Cut:
    """What one run contributes to a comparison: tensors to be added up, and how each is cut and turned.

    Attributes:
        names: The tensors.
        rows: The rows to take along `axis`, as `(split, piece)`; None for all.
        axis: The axis of the rows.
        order: The order of the first axes of activations.
        rotary: Whether the rows of each head are in rotary pairs, to be put into halves.
    """

    names: tuple[TensorName, ...]
    rows: tuple[str, int] | None = None
    axis: int = 0
    order: str = ""
    rotary: bool = False

    def values(self, run: WholeRun, occasions: Sequence[Occasion], head: int = 0) -> Values:
        """Return the tensor of a run, added up over `names` and `occasions`. Raises as `LogicalSeries.numpy`."""
        terms = [self._changed(run, name, at, head) for name in self.names for at in occasions]
        found = terms[0]
        for term in terms[1:]:
            if found.shape != term.shape:
                shapes = f"{list(found.shape)} and {list(term.shape)}"
                raise ContradictoryParts(f"{self.names[0]}: tensors of shapes {shapes} cannot be added up")
            found = found.astype(np.float64) + term
        return found

    def _changed(self, run: WholeRun, name: TensorName, at: Occasion, head: int) -> Values:
        values = run.values(name, at)
        if self.rows is not None:
            rows = _positions(self.rows, run, name, at, values.shape[self.axis])
            values = np.take(values, rows, axis=self.axis)
        if self.rotary and head and values.shape[self.axis] % head == 0:
            values = np.take(values, _in_halves(values.shape[self.axis], head), axis=self.axis)
        if self.order == "sbh" and values.ndim == 3 and not name.is_of_parameter:
            values = values.swapaxes(0, 1)
        return values


def _positions(rows: tuple[str, int], run: WholeRun, name: TensorName, at: Occasion, length: int) -> Any:
    """Return the rows of a piece of a fused tensor with `length` rows."""
    split, piece = rows
    if split == "gated":
        if length % 2:
            raise ContradictoryParts(f"{name} has {length} rows, which are not two halves")
        return np.arange(length).reshape(2, -1)[piece]
    heads = heads_of(run, name, at)
    if heads.rows != length:
        raise ContradictoryParts(f"{name} has {length} rows, and its heads have {heads.rows}")
    return heads.fused_rows()[piece]


def heads_of(run: WholeRun, name: TensorName, at: Occasion) -> QkvHeads:
    """Return the heads of a fused projection. Raises ContradictoryParts without its attributes."""
    told = run.series(name, at).attributes
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
        fused: The fused tensor, which has the attributes of its heads; None without one.
    """

    name: TensorName
    piece: str
    reference: Cut
    other: Cut
    fused: TensorName | None = None
    flipped: bool = False

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
    """Return what can be compared. With a map, either run may be of its left framework."""
    flipped = names is not None and not names.is_left(reference.modules, other.modules)
    left, right = (other, reference) if flipped else (reference, other)
    rights = set(right.names)
    found: list[Aspect] = []
    used: set[TensorName] = set()
    lonely: list[TensorName] = []
    for name in left.names:
        pairs = [pair for pair in _pairs(name, names) if all(one in rights for one in pair[1].names)]
        if not pairs:
            lonely.append(name)
        for piece, there, here in pairs:
            used.update(there.names)
            fused = name if here.rows or there.rotary else None
            one, two = (there, here) if flipped else (here, there)
            found.append(Aspect(one.names[0], piece, one, two, fused, flipped))
    rest = [name for name in right.names if name not in used]
    return Aspects(found, rest, lonely) if flipped else Aspects(found, lonely, rest)


def _pairs(name: TensorName, names: NameMap | None) -> Iterator[tuple[str, Cut, Cut]]:
    """Yield piece, right cut and left cut of a left tensor."""
    if names is None:
        yield "", Cut((name,)), Cut((name,))
        return
    known = names.counterpart(name.module)
    if known is None:
        return
    left, right = names.left, names.right
    theirs = [name._replace(module=module) for module in known.right]
    rotary = right.rotary != left.rotary and known.split == "qkv"
    if known.split == "none":
        if name.tensor in _ROWS or name.tensor in ("input", "grad_input"):
            yield "", Cut((theirs[0],), order=right.order), Cut((name,), order=left.order)
    elif name.tensor == "input":
        yield "", Cut((theirs[0],), order=right.order), Cut((name,), order=left.order)
    elif name.tensor == "grad_input":
        yield "", Cut(tuple(theirs), order=right.order), Cut((name,), order=left.order)
    elif name.tensor in _ROWS:
        axis = _ROWS[name.tensor]
        for number, (piece, their) in enumerate(zip(_PIECES[known.split], theirs, strict=True)):
            turned = rotary and piece in ("query", "key")
            yield (
                piece,
                Cut((their,), None, axis, right.order, turned and right.rotary == "interleaved"),
                Cut(
                    (name,), (known.split, number), axis, left.order, turned and left.rotary == "interleaved"
                ),
            )
