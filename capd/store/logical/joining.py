"""Joins the parts of one tensor: where each part belongs, and the whole tensor, one part in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.errors import ContradictoryParts
from capd.store.logical.layout import Dimension, TensorLayout
from capd.store.logical.placement import shown
from capd.store.logical.positions import (
    AxisSegment,
    Segments,
    blocks,
    listed,
    packed_zigzag,
    qkv,
    through,
    zigzag,
)

__all__ = ["JoinPlan", "ShapedPart", "absent_places", "join_plan", "joined", "part_of", "said"]

Place = tuple[int, ...]
# More pieces than that are written by lists of positions.
_MAX_PIECES = 4096
_NAMED = 16
_MAX_ELEMENTS = 1 << 40


class ShapedPart(NamedTuple):
    """One part of a tensor: the record's name for messages, its layout, and the shape of its elements."""

    name: str
    layout: TensorLayout
    shape: tuple[int, ...]


class JoinPlan(NamedTuple):
    """The shape of a whole tensor, and for each place of its parts where it lies.

    Attributes:
        shape: The shape of the whole, cropped to the true sizes.
        segments: By place, where the part lies along each axis. Copies are not written.
        scale: The factor of each part: one over the number of ranks for a mean.
        reduces: Whether parts are added up.
    """

    shape: tuple[int, ...]
    segments: Mapping[Place, Sequence[Segments]]
    scale: float
    reduces: bool


def absent_places(layout: TensorLayout, present: set[Place]) -> tuple[int, list[Place]]:
    """Return how many places of a tensor no part holds, and the first of them."""
    sizes = [dimension.parts for dimension in layout.dimensions]
    count = prod(sizes) - len(present)
    if not count:
        return 0, []
    named: list[Place] = []
    for place in product(*(range(size) for size in sizes)):
        if place not in present:
            named.append(place)
            if len(named) == _NAMED:
                break
    return count, named


def join_plan(parts: Mapping[Place, ShapedPart]) -> JoinPlan:
    """Return where the parts belong. There is one part for every place.

    Raises:
        ContradictoryParts: The parts do not fit together. The message names the part or the attribute.
    """
    first = next(iter(parts.values()))
    layout, ndim = first.layout, len(first.shape)
    for part in parts.values():
        if part.layout.description != layout.description:
            raise ContradictoryParts(
                f"{part.name} is placed as {said(part.layout)}, and {first.name} as {said(layout)}"
            )
        if len(part.shape) != ndim:
            raise ContradictoryParts(
                f"{part.name} has shape {list(part.shape)}, and {first.name} {list(first.shape)}"
            )
    split: list[list[int]] = [[] for _ in range(ndim)]
    for number, dimension in enumerate(layout.dimensions):
        if dimension.placement.splits:
            split[_axis(dimension.placement.axis, ndim, f"{dimension.name}_placement")].append(number)
    sizes: list[int] = []
    along: list[dict[Place, Segments]] = []
    for axis, numbers in enumerate(split):
        size, segments = _joined_axis(parts, axis, numbers)
        sizes.append(size)
        along.append(segments)
    by_place = {
        place: [along[axis][tuple(place[n] for n in split[axis])] for axis in range(ndim)] for place in parts
    }
    shape = _cropped(sizes, layout)
    if prod(shape) > _MAX_ELEMENTS:
        raise ContradictoryParts(f"the whole of {first.name} would have shape {list(shape)}")
    means = [d.size for d in layout.dimensions if d.placement.reduction == "mean"]
    return JoinPlan(shape, by_place, 1.0 / prod(means), layout.reduces)


def joined(
    plan: JoinPlan, read: Callable[[Place], NDArray[Any]], dtype: np.dtype[np.generic]
) -> NDArray[Any]:
    """Return the whole tensor. Parts are read one after the other.

    Args:
        plan: Where the parts belong.
        read: Returns the elements of the part at a place.
        dtype: The dtype of the result. Parts that are added up are added in float64 and rounded once; integers in
            int64.
    """
    if not plan.reduces:
        whole = np.empty(plan.shape, dtype)
        for place, segments in plan.segments.items():
            part = read(place)
            for target, source in _pieces(segments, plan.shape):
                whole[target] = part[source]
            # The next part is read without this one.
            del part
        return whole
    total: NDArray[Any] = np.zeros(plan.shape, np.int64 if dtype.kind in "iub" else np.float64)
    for place, segments in plan.segments.items():
        part = read(place)
        for target, source in _pieces(segments, plan.shape):
            total[target] += part[source]
        del part
    if plan.scale != 1.0:
        total = total * plan.scale
    return total.astype(dtype, copy=False)


def part_of(
    whole: NDArray[np.generic], segments: Sequence[Segments], part: NDArray[np.generic]
) -> NDArray[np.generic]:
    """Return what a part must be if parts are not added up.

    Args:
        whole: The whole tensor.
        segments: Where the part lies along each axis.
        part: The part. Elements that the whole does not have, because it is cropped, are taken from here.
    """
    expected = part.copy()
    for target, source in _pieces(segments, whole.shape, copies=True):
        expected[source] = whole[target]
    return expected


def said(layout: TensorLayout) -> str:
    """Return the placements of a layout as text."""
    return ", ".join(f"{d.name} {d.placement} of {d.size}" for d in layout.dimensions) or "a whole tensor"


def _axis(axis: int, ndim: int, attribute: str) -> int:
    if not -ndim <= axis < ndim:
        raise ContradictoryParts(f"{attribute} splits axis {axis}, and the tensor has {ndim} axes")
    return axis % ndim


def _joined_axis(
    parts: Mapping[Place, ShapedPart], axis: int, numbers: Sequence[int]
) -> tuple[int, dict[Place, Segments]]:
    """Return the length of an axis, and the segments of parts by their place in the dimensions that split it."""
    of_place: dict[Place, ShapedPart] = {}
    for place, part in parts.items():
        own = tuple(place[number] for number in numbers)
        known = of_place.setdefault(own, part)
        if known.shape[axis] != part.shape[axis]:
            raise ContradictoryParts(
                f"{part.name} has length {part.shape[axis]} along axis {axis}, and {known.name} {known.shape[axis]}; "
                "no placement splits that axis between them"
            )
    return _nested(of_place, axis, list(numbers))


def _nested(
    of_place: Mapping[Place, ShapedPart], axis: int, numbers: Sequence[int]
) -> tuple[int, dict[Place, Segments]]:
    """Join what the last dimensions split, then put the results together as the first dimension says."""
    if not numbers:
        [part] = of_place.values()
        return part.shape[axis], {(): [AxisSegment(0, part.shape[axis])]}
    groups: dict[int, dict[Place, ShapedPart]] = {}
    for place, part in of_place.items():
        groups.setdefault(place[0], {})[place[1:]] = part
    inner = {at: _nested(group, axis, numbers[1:]) for at, group in sorted(groups.items())}
    dimensions = {at: _any(group, numbers[0]) for at, group in groups.items()}
    terms = dimensions[0].placement.terms
    for at in inner:
        if inner[at][0] != inner[at - at % terms][0]:
            raise ContradictoryParts(
                f"{dimensions[0].name}_placement {dimensions[0].placement}: terms of a sum have lengths "
                f"{inner[at - at % terms][0]} and {inner[at][0]} along axis {axis}"
            )
    firsts = list(inner)[::terms]
    outer = _split([inner[at][0] for at in firsts], [dimensions[at] for at in firsts])
    found: dict[Place, Segments] = {}
    for at in inner:
        for rest, own in inner[at][1].items():
            found[(at, *rest)] = through(outer[at // terms], own)
    return sum(one.length for segments in outer for one in segments if not one.copy), found


def _any(group: Mapping[Place, ShapedPart], number: int) -> Dimension:
    return next(iter(group.values())).layout.dimensions[number]


def _split(lengths: Sequence[int], dimensions: Sequence[Dimension]) -> list[Segments]:
    """Return the segments of the parts of one dimension in the axis that it splits."""
    dimension = dimensions[0]
    kind = dimension.placement.kind
    try:
        if kind == "S":
            return blocks(lengths, dimension.placement.blocks)
        if kind == "Z":
            return packed_zigzag(lengths, dimension.ends) if dimension.ends else zigzag(lengths)
        if dimension.heads is not None:
            return qkv(lengths, dimension.heads)
        return listed(lengths, [one.held for one in dimensions])
    except ContradictoryParts as error:
        raise ContradictoryParts(f"{dimension.name}_placement {dimension.placement}: {error}") from None


def _cropped(sizes: Sequence[int], layout: TensorLayout) -> tuple[int, ...]:
    shape = list(sizes)
    for axis, true in layout.cropped:
        at = _axis(axis, len(shape), "true_sizes")
        if true > shape[at]:
            raise ContradictoryParts(
                f"true_sizes says {shown(true)} along axis {axis}, and the parts have {shape[at]} together"
            )
        shape[at] = true
    return tuple(shape)


def _pieces(
    segments: Sequence[Segments], shape: Sequence[int], *, copies: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Yield indices of the whole and of the part that hold the same elements. copies: Also those of copies."""
    slices = [_slices(along, size, copies) for along, size in zip(segments, shape, strict=True)]
    if prod(map(len, slices)) <= _MAX_PIECES:
        for piece in product(*slices):
            # An Ellipsis makes an array of the element of a tensor without axes.
            yield (*(target for target, _ in piece), ...), (*(source for _, source in piece), ...)
        return
    target, source = ([_listed([pair[side] for pair in along]) for along in slices] for side in (0, 1))
    yield np.ix_(*target), np.ix_(*source)


def _slices(segments: Segments, size: int, copies: bool) -> list[tuple[slice, slice]]:
    """Return the slices of the whole axis, up to its cropped size, and those of the part's."""
    found, at = [], 0
    for start, length, copy in segments:
        end = min(start + length, size)
        if end > start and (copies or not copy):
            found.append((slice(start, end), slice(at, at + end - start)))
        at += length
    return found


def _listed(slices: Sequence[slice]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(one.start, one.stop, dtype=np.int64) for one in slices])
