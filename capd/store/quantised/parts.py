"""The parts of one quantised tensor: the captures `weight.qdata`, `weight.scale` and so on at one moment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.store.format.dtypes import value_table

__all__ = ["ATTRIBUTES", "Parts", "TensorPart", "context_of", "part_names"]

ATTRIBUTES = ("tensor_class", "tensor_shape", "tensor_dtype", "tensor_parts", "tensor_context")
"""The attributes of a capture that describe the whole tensor of a part (`capd_client.tensors.subclasses`)."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One part. bits: as stored. dtype: the name of the torch dtype. strides: of the captured part, in elements."""

    bits: NDArray[np.generic]
    dtype: str
    strides: tuple[int, ...]

    def values(self, dtype: str | None = None) -> NDArray[np.float32]:
        """Return the numbers as float32. dtype: the format of bytes that were captured as uint8."""
        if self.bits.dtype.itemsize > 2:
            return self.bits.astype(np.float32)
        codes = self.bits.view(f"u{self.bits.dtype.itemsize}")
        # The conversion is exact: all these formats fit float32.
        found: NDArray[np.float32] = value_table(dtype or self.dtype)[codes].astype(np.float32)
        return found


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole tensor with its parts.

    Attributes:
        name: The name in errors.
        kind: The class, without the module.
        shape: The shape that the tensor shows.
        dtype: The name of the dtype that the tensor shows.
        found: The captured parts by name.
        context: The constants that its class returns from `__tensor_flatten__`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    found: Mapping[str, TensorPart]
    context: Mapping[str, Any]

    def part(self, *names: str) -> TensorPart:
        """Return the first part with one of these names. Raises CapdError if none was captured."""
        for name in names:
            if name in self.found:
                return self.found[name]
        raise self.problem(f"its part {names[0]!r} was not captured")

    def has(self, *names: str) -> bool:
        """Return whether a part with one of these names was captured."""
        return any(name in self.found for name in names)

    def said(self, name: str) -> Any:
        """Return the context's value of this name. Raises CapdError if it has none."""
        if name not in self.context:
            raise self.problem(
                f"its context has no {name!r}; another version of its library may use another name"
            )
        return self.context[name]

    def number(self, name: str) -> int:
        """Return a positive integer of the context. Raises CapdError for any other value."""
        found = self.said(name)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.problem(f"its context has {name} = {found!r}, which is not a positive integer")
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean of the context. Raises CapdError for any other value."""
        found = self.said(name)
        if not isinstance(found, bool):
            raise self.problem(f"its context has {name} = {found!r}, which is neither true nor false")
        return found

    def problem(self, why: str) -> CapdError:
        """Return an error that names the tensor."""
        return CapdError(
            f"{self.name}: cannot dequantise this {self.kind}: {why}; read its parts without dequantise"
        )


def part_names(attributes: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return shape and strides of each part of a record's tensor, by name; empty if the attributes name no parts."""
    said = attributes.get("tensor_parts")
    if not isinstance(said, dict):
        return {}
    return {
        name: (tuple(layout[0]), tuple(layout[1]))
        for name, layout in said.items()
        if isinstance(layout, list) and len(layout) == 2 and all(isinstance(axis, list) for axis in layout)
    }


def context_of(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the context, with TransformerEngine's inner level merged in. None if it is not JSON or was too long."""
    try:
        found = json.loads(attributes.get("tensor_context", ""))
    except (ValueError, TypeError, RecursionError):
        return None
    if isinstance(found, dict) and isinstance(found.get("nontensor_kwargs"), dict):
        found = {**found, **found["nontensor_kwargs"]}
    return found if isinstance(found, dict) else None
