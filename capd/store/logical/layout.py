"""What the attributes of a record say of the tensor's part: the dimensions over which it is distributed, and its place.

Attributes come from a store, which may come from anybody: every value is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from capd.errors import ContradictoryParts
from capd.store.logical.placement import Placement, parse_placement, shown
from capd.store.logical.positions import QkvHeads

__all__ = ["PART", "Dimension", "TensorLayout", "coordinates_of", "layout_of"]

PART = ("rank", "size", "placement", "index")
"""The ends of the names of the attributes that differ between the parts of a tensor."""

_RANK = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,63})_rank")
_PLACEMENT = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,63})_placement")
_ORDERS = {"zigzag": "Z", "contiguous": "S", "index": "I"}
# Larger than any cluster. A hostile size must not cost time or memory.
_MAX_RANKS = 1 << 17
_MAX_POSITIONS = 1 << 24
# Megatron distributes over context parallel ranks first; sequence parallelism splits what is left.
_FIRST = ("cp",)


class Dimension(NamedTuple):
    """One dimension of the ranks, a rank's place in it, and how the tensor is distributed over it.

    Attributes:
        name: Its name, such as "tp".
        rank, size: The rank's place.
        placement: The placement.
        held: The positions that the part holds, for the placement I(d).
        ends: The ends of packed documents (`cu_seqlens`), for the placement Z(d); empty without packing.
        heads: The heads of the projection, for the placement QKV(d).
    """

    name: str
    rank: int
    size: int
    placement: Placement
    held: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    heads: QkvHeads | None = None

    @property
    def parts(self) -> int:
        """The number of different parts; terms of a sum are different."""
        return 1 if self.placement.kind == "R" else self.size // self.placement.copies

    @property
    def part(self) -> int:
        """The part that the rank holds."""
        return 0 if self.placement.kind == "R" else self.rank // self.placement.copies

    @property
    def description(self) -> tuple[object, ...]:
        """What all parts of one tensor must agree on."""
        heads = None if self.heads is None else vars(self.heads).items()
        return (self.name, self.size, self.placement, self.ends, heads and tuple(heads))


class TensorLayout(NamedTuple):
    """How a tensor is distributed, and which part a rank holds.

    Attributes:
        dimensions: The dimensions with a placement, in the order in which they split the tensor.
        cropped: True sizes of axes of the whole tensor that the job padded, by axis.
    """

    dimensions: tuple[Dimension, ...]
    cropped: tuple[tuple[int, int], ...] = ()

    @property
    def place(self) -> tuple[int, ...]:
        """The part of every dimension that the rank holds. Replicas have the same place."""
        return tuple(dimension.part for dimension in self.dimensions)

    @property
    def description(self) -> tuple[object, ...]:
        """What all parts of one tensor must agree on."""
        return (*(dimension.description for dimension in self.dimensions), self.cropped)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(dimension.placement.kind == "R" for dimension in self.dimensions)

    @property
    def reduces(self) -> bool:
        """Whether parts are to be added up."""
        return any(
            dimension.size > 1 and (dimension.placement.kind == "P" or dimension.placement.terms > 1)
            for dimension in self.dimensions
        )


def coordinates_of(attributes: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the rank's place and the size of every dimension of the ranks, by its name.

    Raises:
        ContradictoryParts: A place or a size is no number, or the place is not below the size.
    """
    found = {}
    for attribute in attributes:
        if (match := _RANK.fullmatch(attribute)) is not None:
            found[match[1]] = _place(match[1], attributes)
    return found


def layout_of(attributes: Mapping[str, Any]) -> TensorLayout:
    """Return what the attributes of a record say of the part.

    Raises:
        ContradictoryParts: An attribute is not what docs/logical.md says, or contradicts another one. The message
            names it.
    """
    named = [match[1] for attribute in attributes if (match := _PLACEMENT.fullmatch(attribute)) is not None]
    found = tuple(_dimension(name, attributes) for name in _ordered(named, attributes))
    if prod(dimension.size for dimension in found) > _MAX_RANKS:
        raise ContradictoryParts(f"its dimensions have more than {_MAX_RANKS} ranks together")
    return TensorLayout(found, _cropped(attributes.get("true_sizes")))


def _ordered(named: list[str], attributes: Mapping[str, Any]) -> list[str]:
    mesh = attributes.get("mesh", ())
    if not isinstance(mesh, (list, tuple)) or not all(isinstance(name, str) for name in mesh):
        raise ContradictoryParts(f"mesh is {shown(mesh)}; it must list names of dimensions")
    if len(set(mesh)) < len(mesh):
        raise ContradictoryParts(f"mesh {shown(mesh)} names a dimension twice")
    listed = [name for name in mesh if name in named]
    rest = sorted((name for name in named if name not in mesh), key=lambda name: (name not in _FIRST, name))
    return [*rest, *listed]


def _dimension(name: str, attributes: Mapping[str, Any]) -> Dimension:
    try:
        placement = parse_placement(attributes[f"{name}_placement"])
    except ContradictoryParts as error:
        raise ContradictoryParts(f"{name}_placement: {error}") from None
    rank, size = _place(name, attributes)
    placement = _in_order(name, placement, attributes.get(f"{name}_order"))
    if size % (placement.copies * placement.terms):
        raise ContradictoryParts(
            f"{name}_placement {placement}: {size} ranks cannot be divided into groups that hold the same part"
        )
    held: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    if placement.kind == "I":
        held = _numbers(f"{name}_index", attributes.get(f"{name}_index"))
    if placement.kind == "Z" and "cu_seqlens" in attributes:
        ends = _numbers("cu_seqlens", attributes["cu_seqlens"])
        if any(b < a for a, b in pairwise(ends)):
            raise ContradictoryParts(f"cu_seqlens {shown(ends)} does not grow")
    heads = _heads(attributes) if placement.kind == "QKV" else None
    return Dimension(name, rank, size, placement, held, ends, heads)


def _in_order(name: str, placement: Placement, order: Any) -> Placement:
    """Return the placement with the kind that `<dim>_order` says, which only a plain split leaves open."""
    if order is None or not placement.splits:
        return placement
    kind = _ORDERS.get(order) if isinstance(order, str) else None
    if kind is None:
        raise ContradictoryParts(f"{name}_order is {shown(order)}; known are {', '.join(_ORDERS)}")
    if placement.kind == kind:
        return placement
    if placement.kind != "S" or placement != Placement("S", placement.axis):
        raise ContradictoryParts(
            f"{name}_placement {placement} and {name}_order {order} contradict each other"
        )
    return placement._replace(kind=kind)


def _place(name: str, attributes: Mapping[str, Any]) -> tuple[int, int]:
    rank: Any = attributes.get(f"{name}_rank")
    size: Any = attributes.get(f"{name}_size")
    if not _is_count(rank) or not _is_count(size):
        raise ContradictoryParts(
            f"{name}_rank is {shown(rank)} and {name}_size {shown(size)}; they must be a rank and the number of ranks"
        )
    if size > _MAX_RANKS:
        raise ContradictoryParts(
            f"{name}_size is {shown(size)}; at most {_MAX_RANKS} ranks can hold a tensor"
        )
    if not rank < size:
        raise ContradictoryParts(f"{name}_rank {rank} is not below {name}_size {size}")
    return rank, size


def _heads(attributes: Mapping[str, Any]) -> QkvHeads:
    names = ("qkv_heads", "qkv_groups", "qkv_head_dim")
    values: list[Any] = [attributes.get(name) for name in names]
    if not all(_is_count(value) and 1 <= value < _MAX_POSITIONS for value in values):
        said = ", ".join(f"{name} {shown(value)}" for name, value in zip(names, values, strict=True))
        raise ContradictoryParts(f"a fused projection needs numbers of heads: {said}")
    return QkvHeads(*values)


def _cropped(value: Any) -> tuple[tuple[int, int], ...]:
    pairs = [] if value is None else value
    if not isinstance(pairs, (list, tuple)):
        raise ContradictoryParts(
            f"true_sizes is {shown(value)}; it must list pairs of an axis and its true size"
        )
    found = []
    for pair in pairs:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not (is_pair and type(pair[0]) is int and _is_count(pair[1])):
            raise ContradictoryParts(f"true_sizes has {shown(pair)}; it must be an axis and its true size")
        found.append((pair[0], pair[1]))
    return tuple(found)


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_POSITIONS:
        raise ContradictoryParts(f"{name} is {shown(value)}; it must list positions")
    if not all(_is_count(number) and number < 2**62 for number in value):
        raise ContradictoryParts(f"{name} has a value that is no position: {shown(value)}")
    return tuple(value)


def _is_count(value: Any) -> bool:
    """Whether a value is a number from 0 on. True and 1.0 are none."""
    return type(value) is int and value >= 0
