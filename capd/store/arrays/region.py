"""The region of a record that a reader wants, and its chunks: numpy basic indexing with positive steps."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from types import EllipsisType
from typing import NamedTuple, SupportsIndex, TypeAlias

import numpy as np

from capd.errors import CapdError
from capd.store.format.geometry import Geometry

__all__ = ["Piece", "Region", "Selection", "select"]

Part: TypeAlias = SupportsIndex | slice | EllipsisType
Region: TypeAlias = Part | tuple[Part, ...]


class Piece(NamedTuple):
    """The part of one chunk in a selection.

    target: the slices of the selection (no axis dropped). source: the slices of the chunk. whole: all elements of the
    chunk are taken, in order.
    """

    ordinal: int
    target: tuple[slice, ...]
    source: tuple[slice, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected indexes per axis of a record. An axis that an integer picked is dropped from the result."""

    axes: tuple[range, ...]
    dropped: tuple[bool, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        """The number of elements along each axis of the record."""
        return tuple(map(len, self.axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(len(axis) for axis, drop in zip(self.axes, self.dropped, strict=True) if not drop)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The selection as slices of the whole record."""
        return tuple(slice(axis.start, axis.stop, axis.step) for axis in self.axes)

    def pieces(self, geometry: Geometry) -> Iterator[Piece]:
        """Yield the chunks of a record that hold selected elements."""
        if 0 in self.extents:
            return
        lengths = geometry.chunk
        along = [_along(axis, length) for axis, length in zip(self.axes, lengths, strict=True)]
        for parts in product(*along):
            ordinal = 0
            for count, (index, _, _) in zip(geometry.grid, parts, strict=True):
                ordinal = ordinal * count + index
            target = tuple(part[1] for part in parts)
            source = tuple(part[2] for part in parts)
            yield Piece(ordinal, target, source, prod(t.stop - t.start for t in target) == prod(lengths))


def _along(axis: range, length: int) -> list[tuple[int, slice, slice]]:
    """Return (chunk index, slice of the selection, slice of the chunk) along one axis with chunks of `length`."""
    found = []
    for index in range(axis[0] // length, axis[-1] // length + 1):
        # The range of the selected elements that are in this chunk.
        first = max(0, -((axis.start - index * length) // axis.step))
        stop = min(len(axis), -((axis.start - (index + 1) * length) // axis.step))
        if first < stop:
            start = axis[first] - index * length
            last = axis[stop - 1] - index * length
            found.append((index, slice(first, stop), slice(start, last + 1, axis.step)))
    return found


def select(region: Region, shape: tuple[int, ...]) -> Selection:
    """Return the elements that `region` selects in a record of `shape`.

    Raises:
        CapdError: `region` is not basic indexing with positive steps, or an index is out of range.
    """
    parts = region if isinstance(region, tuple) else (region,)
    given = [part for part in parts if part is not Ellipsis]
    if len(parts) - len(given) > 1:
        raise CapdError(f"region {region!r}: at most one Ellipsis (...) is allowed")
    if len(given) > len(shape):
        raise CapdError(f"region {region!r} has {len(given)} indexes, the record has shape {list(shape)}")
    at = next((n for n, part in enumerate(parts) if part is Ellipsis), len(given))
    full: list[SupportsIndex | slice] = [slice(None)] * (len(shape) - len(given))
    given[at:at] = full
    axes, dropped = [], []
    for part, extent in zip(given, shape, strict=True):
        axes.append(_axis(part, extent, region))
        dropped.append(not isinstance(part, slice))
    return Selection(tuple(axes), tuple(dropped))


def _axis(part: object, extent: int, region: Region) -> range:
    try:
        if isinstance(part, slice):
            chosen = range(*part.indices(extent))
            if chosen.step > 0:
                return chosen
            raise CapdError(f"region {region!r}: steps must be positive; reverse the result instead")
        if isinstance(part, (bool, np.bool_)):
            raise TypeError
        index = operator.index(part)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise CapdError(
            f"region {region!r}: {part!r} is neither an integer nor a slice of integers; "
            "read the record and index the array for anything else"
        ) from None
    if not -extent <= index < extent:
        raise CapdError(f"region {region!r}: index {index} is outside of an axis with {extent} elements")
    return range(index % extent, index % extent + 1)
