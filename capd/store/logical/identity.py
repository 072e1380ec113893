"""Which series of a run hold parts of the same tensor: its logical name, and the dimensions that tell samples apart.

A dimension of the ranks with a placement is joined. Others are treated as follows.

- `batch_dims` lists the dimensions whose ranks have other samples, such as data parallel ranks. They tell tensors
  apart. Ranks of the dimensions that are neither placed nor listed hold the same.
- Without `batch_dims`, nothing says what such a dimension does. Parameters are taken for replicas. Other tensors are
  told apart by it.
- Without any dimension, a tensor that several ranks have is told apart by the rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from capd.errors import ContradictoryParts
from capd.store.logical.layout import coordinates_of, layout_of
from capd.store.logical.placement import shown
from capd_client.protocol.key import Key

__all__ = ["Identity", "identity_of", "is_parameter", "logical_module"]

_LOCAL_EXPERT = re.compile(r"(^|\.)(?:experts\.)?local_experts\.[0-9]+(?=\.|$)")
_PARAMETERS = ("weight", "bias")
# torchtitan cuts all its meshes out of one dimension that has all ranks.
_EVERYTHING = "world"
# They divide the layers, not the tensors.
_STAGES = ("pp", "vpp")


class Identity(NamedTuple):
    """What all parts of one tensor have in common.

    Attributes:
        key: The key with the module's name over all ranks. The rank is 0.
        dtype: The captured dtype.
        coordinates: The ranks in the dimensions that tell samples apart, by their names.
    """

    key: Key
    dtype: str
    coordinates: tuple[tuple[str, int], ...]


def logical_module(module: str, attributes: Mapping[str, Any]) -> str:
    """Return a module's name over all ranks: an expert is named by its number over all ranks.

    `mlp.experts.local_experts.1.linear_fc1` of expert 5 is `mlp.experts.5.linear_fc1`.

    Raises:
        ContradictoryParts: The number is none.
    """
    number = attributes.get("expert")
    if number is None:
        return module
    if type(number) is not int or number < 0:
        raise ContradictoryParts(f"expert is {shown(number)}; it must be a number over all ranks")
    return _LOCAL_EXPERT.sub(rf"\g<1>experts.{number}", module, count=1)


def is_parameter(key: Key) -> bool:
    """Return whether a key is of a parameter, or of a part of a quantised one. Its replicas hold the same values."""
    return key.tensor_name in _PARAMETERS or key.tensor_name.startswith("weight.")


def identity_of(key: Key, dtype: str, attributes: Mapping[str, Any]) -> Identity:
    """Return which tensor a series with this key and these attributes has a part of.

    Raises:
        ContradictoryParts: An attribute is not what docs/logical.md says.
    """
    places = coordinates_of(attributes)
    placed = {dimension.name for dimension in layout_of(attributes).dimensions}
    found = {
        name: places[name][0]
        for name in _telling(key, attributes, places)
        if name not in placed and places[name][1] > 1
    }
    module = logical_module(key.module, attributes)
    return Identity(msgspec.structs.replace(key, rank=0, module=module), dtype, tuple(sorted(found.items())))


def _telling(key: Key, attributes: Mapping[str, Any], places: Mapping[str, Any]) -> Iterable[str]:
    """Return the dimensions whose ranks may have other samples."""
    if is_parameter(key):
        return ()
    batch = attributes.get("batch_dims")
    if batch is None:
        return [name for name in places if name not in (_EVERYTHING, *_STAGES)]
    if not isinstance(batch, (list, tuple)) or not all(isinstance(name, str) for name in batch):
        raise ContradictoryParts(f"batch_dims is {shown(batch)}; it must list names of dimensions")
    if unknown := [name for name in batch if name not in places]:
        raise ContradictoryParts(
            f"batch_dims names {shown(unknown[0])}, and there is no {shown(unknown[0])[1:-1]}_rank"
        )
    return batch
