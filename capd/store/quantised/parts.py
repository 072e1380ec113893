"""The parts of one quantised tensor: what was captured under `weight.qdata`, `weight.scale` and so on at one moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.store.format.dtypes import value_table
from capd_client.protocol.key import Key

__all__ = ["ATTRIBUTES", "Part", "PartRecord", "PartSeries", "Parts", "part_names"]

ATTRIBUTES = ("tensor_class", "tensor_shape", "tensor_dtype", "tensor_parts", "tensor_context")
"""What a capture says of the tensor that a part belongs to (`capd_client.tensors.subclasses`)."""


class PartRecord(Protocol):
    """A record of a part: a `Record` that users read. Its moment's fields are attributes, too."""

    @property
    def index(self) -> int:
        """Its number in the series."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What the capture said of the tensor that the part belongs to."""


class PartSeries(Protocol):
    """The records of one part: a `Series` that users read."""

    @property
    def key(self) -> Key:
        """What the part is."""

    @property
    def path(self) -> str:
        """Its place in the run, for messages."""

    @property
    def kept(self) -> str:
        """What is stored of each capture: "tensor" or "statistics"."""

    @property
    def dtype(self) -> str:
        """The torch dtype's name."""

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of its records."""

    @property
    def siblings(self) -> Sequence[PartSeries]:
        """The series of the same module, rank and operation."""

    def record(self, number: int) -> PartRecord:
        """The record with this number."""

    def read(self, number: int) -> NDArray[np.generic]:
        """Its stored bits."""


@dataclass(frozen=True, slots=True)
class Part:
    """bits: as stored. dtype: the torch dtype's name. strides: of the captured part, in elements."""

    bits: NDArray[np.generic]
    dtype: str
    strides: tuple[int, ...]

    def values(self, dtype: str | None = None) -> NDArray[np.float32]:
        """Its numbers. dtype: what its bytes mean, where they were captured as uint8."""
        if self.bits.dtype.itemsize > 2:
            return self.bits.astype(np.float32)
        codes = self.bits.view(f"u{self.bits.dtype.itemsize}")
        found: NDArray[np.float32] = value_table(dtype or self.dtype)[codes].astype(np.float32)  # exact
        return found


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole tensor. name: what errors call it. kind: its class, without the module. shape, dtype: as it shows itself.
    context: what its class says of itself."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    found: Mapping[str, Part]
    context: Mapping[str, Any]

    def part(self, *names: str) -> Part:
        """The part of one of these names. Raises CapdError where it was not captured."""
        for name in names:
            if name in self.found:
                return self.found[name]
        raise self.problem(f"its part {names[0]!r} was not captured")

    def has(self, *names: str) -> bool:
        """Whether it has a part of one of these names."""
        return any(name in self.found for name in names)

    def said(self, name: str) -> Any:
        """What the context says under this name. Raises CapdError where it says nothing."""
        if name not in self.context:
            raise self.problem(
                f"its context does not say {name!r}; another version of its library may call it otherwise"
            )
        return self.context[name]

    def number(self, name: str) -> int:
        """A positive whole number of the context."""
        found = self.said(name)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.problem(f"its context says {name} = {found!r}, which is no positive number")
        return found

    def flag(self, name: str) -> bool:
        """What the context says, true or false."""
        found = self.said(name)
        if not isinstance(found, bool):
            raise self.problem(f"its context says {name} = {found!r}, which is neither true nor false")
        return found

    def problem(self, why: str) -> CapdError:
        """An error that names the tensor."""
        return CapdError(
            f"{self.name}: cannot dequantise this {self.kind}: {why}; its parts read as captured"
        )


def part_names(attributes: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By name the shape and strides of each part of the tensor that a record belongs to; empty where it says none."""
    said = attributes.get("tensor_parts")
    if not isinstance(said, dict):
        return {}
    return {
        name: (tuple(layout[0]), tuple(layout[1]))
        for name, layout in said.items()
        if isinstance(layout, list) and len(layout) == 2 and all(isinstance(axis, list) for axis in layout)
    }


def context_of(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The context; TransformerEngine's own lies one level down. None where it is no JSON, or was too long to keep."""
    try:
        found = json.loads(attributes.get("tensor_context", ""))
    except (ValueError, TypeError, RecursionError):
        return None
    if isinstance(found, dict) and isinstance(found.get("nontensor_kwargs"), dict):
        found = {**found, **found["nontensor_kwargs"]}
    return found if isinstance(found, dict) else None
