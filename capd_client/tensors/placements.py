"""The part of a distributed tensor that a rank holds, as attributes of its series.

Each dimension of the device mesh has three attributes. `tp_placement` is the tensor's layout over the dimension, as
DTensor prints it: "S(0)" is split along axis 0, "R" is the same everywhere, "P(sum)" is to be added up. `tp_rank` and
`tp_size` identify the part.

`mesh` lists the dimensions in the order in which they split. FSDP splits the part that tensor parallelism left to the
rank, although FSDP's dimension is the outer one of the mesh. DTensor prints "_S(0, 2)" there; capd writes "S(0)".
Nothing in this module starts a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Optional

import msgspec
import torch

from capd_client.tensors.inspect import PLAIN_TYPES

__all__ = ["PlacedTensor", "coordinates", "mark", "placements_of", "with_placements"]

Attributes = dict[str, Any]

# mesh → placements → attributes. A mesh holds process groups, so this must not keep it alive.
_described: weakref.WeakKeyDictionary[Any, dict[Any, Attributes]] = weakref.WeakKeyDictionary()


class PlacedTensor(torch.Tensor):
    """A plain tensor that was part of a distributed one before a compiled graph took it apart."""

    placements: Attributes


def with_placements(tensor: torch.Tensor, attributes: Optional[Attributes]) -> Optional[Attributes]:
    """Return `attributes`, extended by the placements if `tensor` is a part of a distributed one."""
    found = tensor.placements if isinstance(tensor, PlacedTensor) else _of_dtensor(tensor)
    return {**(attributes or {}), **found} if found else attributes


def placements_of(tensor: Any) -> str:
    """Return the placements as JSON text, which a compiled graph keeps as a constant; "" for a whole tensor."""
    found = None if type(tensor) in PLAIN_TYPES else _of_dtensor(tensor)
    return msgspec.json.encode(found).decode() if found else ""


@lru_cache(maxsize=1024)
def _decoded(placements: str) -> Attributes:
    decoded: Attributes = msgspec.json.decode(placements)
    # Attributes that can be hashed are found faster.
    decoded["mesh"] = tuple(decoded["mesh"])
    return decoded


def mark(tensor: torch.Tensor, placements: str) -> torch.Tensor:
    """Return the plain tensor with the placements that `placements_of` returned for it, at run time of the graph."""
    if not placements:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_leaf:
            part = torch.Tensor._make_subclass(PlacedTensor, tensor.detach(), tensor.requires_grad)
        else:
            part = tensor.as_subclass(PlacedTensor)
    part.placements = _decoded(placements)
    return part


def coordinates(parameters: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    """Return this rank's place in every dimension of the meshes over which a model's parameters are distributed.

    The meshes from which these were cut are included. torchtitan cuts all of its meshes out of one whose only named
    dimension is "world".
    """
    meshes = dict.fromkeys(p.device_mesh for p in parameters if type(p).__name__ == "DTensor")
    found: Attributes = {}
    for mesh in meshes:
        found |= {**_place(_root_of(mesh)), **_place(mesh)}
    return tuple(found.items())


def _of_dtensor(tensor: Any) -> Attributes:
    if type(tensor).__name__ != "DTensor":
        return {}
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    known = _described.setdefault(mesh, {})
    if placements not in known:
        names = _names(mesh)
        by_name = dict(zip(names, placements, strict=True))
        late = [name for name, where in by_name.items() if type(where).__name__ == "_StridedShard"]
        order = (*(name for name in names if name not in late), *reversed(late))
        laid_out = {
            f"{name}_placement": f"S({where.dim})" if name in late else str(where)
            for name, where in by_name.items()
        }
        # A mesh cut out of a larger one does not tell the groups apart that know nothing of each other.
        known[placements] = {"mesh": order, **laid_out, **_place(_root_of(mesh)), **_place(mesh)}
    return known[placements]


def _names(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"mesh{dimension}" for dimension in range(mesh.ndim)))


def _place(mesh: Any) -> Mapping[str, Any]:
    coordinate = mesh.get_coordinate()
    # A mesh without this rank.
    if coordinate is None:
        return {}
    found = {}
    for name, rank, size in zip(_names(mesh), coordinate, mesh.shape, strict=True):
        found[f"{name}_rank"], found[f"{name}_size"] = rank, size
    return found


def _root_of(mesh: Any) -> Any:
    """Return the mesh from which `mesh` was cut."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)
