"""The placements of a part in the words of sglang's comparator, and back.

capd keeps `<dim>_placement`, `<dim>_rank` and `<dim>_size` for each dimension of the device mesh. The comparator reads
one text for all of them: `d0 d1[tp] # cp:replicated`. Dimensions that split one axis stand in the order in which they
split. Source: sglang 0.5.23, `debug_utils/comparator/dims_spec` and `aligner`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from capd.errors import ContradictoryParts
from capd.store.logical.layout import Dimension, coordinates_of, layout_of

__all__ = ["AXES", "ParallelPlace", "dims_of", "placements_in"]

AXES = ("tp", "cp", "ep", "sp", "dp", "etp", "edp", "attn_tp", "attn_dp", "moe_ep", "moe_tp", "moe_dp")
"""The dimensions of a mesh that the comparator knows."""

_DIM = re.compile(r"(1|[A-Za-z_]\w{0,63}|\([^()\[\]]{1,200}\))(?:\[([^\]]{1,200})\])?\Z")
# Zigzag order is undone on an axis of this name alone.
_SEQUENCE = "s"
# Of the ranks of "dp", the comparator expects one that holds data. A group of another name, which no file has, makes
# it join them as the text says.
_OTHER_DP = ("moe_dp", "attn_dp", "edp")


class ParallelPlace(NamedTuple):
    """The place of a part in the comparator's words.

    Attributes:
        dims: The text of the dimensions.
        info: `<axis>_rank` and `<axis>_size` of the axes that the text names.
        tags: The ranks of axes over which other ranks hold other samples. They belong to the name of a file.
        problem: The reason why the words cannot say it. "" if they can.
    """

    dims: str
    info: dict[str, int]
    tags: dict[str, int]
    problem: str = ""


class _NoWord(ValueError):
    """A placement that the comparator has no word for. The message says which."""


def dims_of(attributes: Mapping[str, Any], ndim: int, *, of_tokens: bool) -> ParallelPlace:
    """Return the place of a part. The text says nothing of dimensions of the mesh without a placement.

    Args:
        attributes: The attributes of the record.
        ndim: The dimensions of the tensor.
        of_tokens: Whether its first axis may be the sequence. Layouts with and without zigzag must name it alike.
    """
    try:
        places, layout = coordinates_of(attributes), layout_of(attributes)
        placed = [dimension for dimension in layout.dimensions if dimension.size > 1]
        info: dict[str, int] = {}
        for one in placed:
            info |= {f"{one.name}_rank": one.rank, f"{one.name}_size": one.size}
        return ParallelPlace(_text(placed, ndim, of_tokens), info, _batch_ranks(attributes, places, info))
    except ContradictoryParts as error:
        return ParallelPlace("", {}, {}, f"the attributes contradict each other: {error}")
    except _NoWord as error:
        return ParallelPlace("", {}, {}, str(error))


def _batch_ranks(
    attributes: Mapping[str, Any], places: Mapping[str, tuple[int, int]], placed: Mapping[str, int]
) -> dict[str, int]:
    batch = attributes.get("batch_dims", ("dp",))
    if not isinstance(batch, (list, tuple)):
        raise ContradictoryParts("batch_dims is no list")
    return {
        f"{name}_rank": rank
        for name, (rank, size) in places.items()
        if name in batch and size > 1 and f"{name}_rank" not in placed
    }


def _text(placed: Sequence[Dimension], ndim: int, of_tokens: bool) -> str:
    if not ndim:
        if placed:
            raise _NoWord("its grammar needs a dimension, and a scalar has none")
        return ""
    zigzags = {one.placement.axis % ndim for one in placed if one.placement.kind == "Z"}
    sequence = zigzags or ({0} if of_tokens else set())
    modifiers: dict[int, list[str]] = {}
    declared = []
    for one in placed:
        said = f"{one.name}_placement {str(one.placement)!r}"
        if one.name not in AXES:
            raise _NoWord(f"it knows no dimension {one.name!r} of a mesh")
        if one.placement.kind == "R":
            declared.append(f"{one.name}:replicated")
            continue
        axis, word = _modifier(one, ndim, said)
        # It puts the chunks in order at the end, so zigzag must be the first split.
        if one.placement.kind == "Z" and (axis in modifiers or len(zigzags) > 1):
            raise _NoWord(f"it does not undo {said} after another split")
        modifiers.setdefault(axis, []).append(word)
    names = {one.name for one in placed}
    if "dp" in names:
        declared.append(f"dp:={next(other for other in _OTHER_DP if other not in names)}")
    words = [_SEQUENCE if axis in sequence else f"d{axis}" for axis in range(ndim)]
    for axis, own in modifiers.items():
        words[axis] += f"[{','.join(own)}]"
    return " ".join(words + (["#", *declared] if declared else []))


def _modifier(one: Dimension, ndim: int, said: str) -> tuple[int, str]:
    """Return the axis that a placement changes, and the comparator's word for it."""
    placement = one.placement
    if placement.reduction == "sum":
        return 0, f"{one.name}:partial"
    is_plain = placement.blocks == placement.copies == placement.terms == 1 and not one.ends
    if placement.kind not in ("S", "Z") or not is_plain or not -ndim <= placement.axis < ndim:
        raise _NoWord(f"{said} has no word in its grammar")
    return placement.axis % ndim, one.name if placement.kind == "S" else f"{one.name}:zigzag"


def placements_in(dims: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a part from the comparator's text and the dumper's parallel info.

    Raises:
        ValueError: The text is not one of the comparator's grammar, or a rank is outside its size.
    """
    shape, _, declared = dims.partition("#")
    placements: dict[str, str] = {}
    for at, token in enumerate(shape.split()):
        match = _DIM.match(token)
        if match is None:
            raise ValueError(f"{token[:64]!r} is no dimension of its grammar")
        for word in (match[2] or "").split(","):
            axis, _, qualifiers = word.strip().partition(":")
            if axis:
                placements[axis] = _placement(at, qualifiers, word)
    for token in declared.split():
        axis, _, word = token.partition(":")
        if word == "replicated":
            placements[axis] = "R"
    found: dict[str, Any] = {}
    for axis in AXES:
        rank, size = info.get(f"{axis}_rank"), info.get(f"{axis}_size")
        if type(rank) is int and type(size) is int and size > 1:
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank {rank} is outside {axis}_size {size}")
            found |= {f"{axis}_rank": rank, f"{axis}_size": size}
            if axis in placements:
                found[f"{axis}_placement"] = placements[axis]
    order = [axis for axis in placements if f"{axis}_placement" in found]
    return {**found, "mesh": order} if len(order) > 1 else found


def _placement(axis: int, qualifiers: str, word: str) -> str:
    known = {"": "S({})", "sharded": "S({})", "natural": "S({})", "zigzag": "Z({})", "partial": "P(sum)"}
    if qualifiers not in known:
        raise ValueError(f"{word.strip()[:64]!r} has an unknown qualifier")
    return known[qualifiers].format(axis)
