"""The placements of a part in the words of sglang's comparator, and back.

capd keeps `<dim>_placement`, `<dim>_rank` and `<dim>_size` for each dimension of the device mesh. The comparator reads
one text for all of them: `d0 d1[tp] # cp:replicated`. It must name every dimension of a mesh with several ranks.
Source: sglang 0.5.23, `debug_utils/comparator/dims_spec`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["AXES", "ParallelPlace", "dims_of", "placements_in"]

AXES = ("tp", "cp", "ep", "sp", "dp", "etp", "edp")
"""The dimensions of a mesh that the comparator knows under the names of Megatron."""

_SPLIT = re.compile(r"S\((-?\d{1,2})\)\Z")
_ZIGZAG = re.compile(r"Z\((-?\d{1,2})\)\Z")
_DIM = re.compile(r"([A-Za-z_]\w{0,63})(?:\[([^\]]{1,200})\])?\Z")


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


def dims_of(attributes: Mapping[str, Any], ndim: int) -> ParallelPlace:
    """Return the place of a part of `ndim` dimensions."""
    names = [f"d{axis}" for axis in range(ndim)]
    modifiers: dict[int, list[str]] = {}
    info: dict[str, int] = {}
    tags: dict[str, int] = {}
    replicated = []
    for axis in _meshes(attributes):
        rank, size = attributes[f"{axis}_rank"], attributes[f"{axis}_size"]
        placement = str(attributes.get(f"{axis}_placement", ""))
        if not placement or placement == "R":
            if not placement and axis == "dp":
                tags[f"{axis}_rank"] = rank
                continue
            replicated.append(f"{axis}:replicated")
        else:
            found = _modifier(axis, placement, ndim)
            if found is None:
                return ParallelPlace("", {}, {}, f"{axis}_placement {placement!r} has no word in its grammar")
            modifiers.setdefault(found[0], []).append(found[1])
        info |= {f"{axis}_rank": rank, f"{axis}_size": size}
    unknown = [name for name in _sizes(attributes) if name not in AXES]
    if unknown:
        return ParallelPlace("", {}, {}, f"it knows no dimension {unknown[0]!r} of a mesh")
    if not ndim:
        return (
            ParallelPlace("", info, tags, "its grammar needs a dimension")
            if info
            else ParallelPlace("", info, tags)
        )
    texts = [
        f"{name}[{','.join(modifiers[axis])}]" if axis in modifiers else name
        for axis, name in enumerate(names)
    ]
    return ParallelPlace(" ".join(texts + (["#", *replicated] if replicated else [])), info, tags)


def _sizes(attributes: Mapping[str, Any]) -> list[str]:
    """Return the dimensions of the mesh with several ranks."""
    return [
        name.removesuffix("_size")
        for name, size in attributes.items()
        if name.endswith("_size")
        and type(size) is int
        and size > 1
        and f"{name.removesuffix('_size')}_rank" in attributes
    ]


def _meshes(attributes: Mapping[str, Any]) -> list[str]:
    # A stage of a pipeline holds other layers, and other names.
    return [name for name in _sizes(attributes) if name in AXES]


def _modifier(axis: str, placement: str, ndim: int) -> tuple[int, str] | None:
    """Return the dimension that a placement changes, and the comparator's word for it."""
    for pattern, word in ((_SPLIT, axis), (_ZIGZAG, f"{axis}:zigzag")):
        if match := pattern.match(placement):
            at = int(match[1])
            return (at % ndim, word) if -ndim <= at < ndim else None
    return (0, f"{axis}:partial") if placement == "P(sum)" and ndim else None


def placements_in(dims: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a part from the comparator's text and the dumper's parallel info.

    Raises:
        ValueError: The text is not one of the comparator's grammar, or a rank is outside its size.
    """
    shape, _, declared = dims.partition("#")
    placements: dict[str, str] = {}
    for at, token in enumerate(shape.split()):
        match = _DIM.match(token)
        if match is None and not token.startswith("("):
            raise ValueError(f"{token[:64]!r} is no dimension of its grammar")
        words = match[2] if match else token.partition("[")[2].rstrip("]")
        for word in (words or "").split(","):
            axis, _, qualifiers = word.strip().partition(":")
            if axis:
                known = {
                    "": f"S({at})",
                    "sharded": f"S({at})",
                    "natural": f"S({at})",
                    "zigzag": f"Z({at})",
                    "partial": "P(sum)",
                }
                if qualifiers not in known:
                    raise ValueError(f"{word.strip()[:64]!r} has an unknown qualifier")
                placements[axis] = known[qualifiers]
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
    return found
