"""Dequantises tensors: from the parts of a tensor to its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.store.quantised import torchao, transformer_engine
from capd.store.quantised.parts import Parts, TensorPart, context_of, part_names
from capd_client.process.text import printable

__all__ = ["class_of", "dequantised", "whole_name", "whole_of"]

_LIBRARIES: dict[str, Mapping[str, Callable[[Parts], NDArray[np.float32]]]] = {
    "torchao": torchao.CLASSES,
    "transformer_engine": transformer_engine.CLASSES,
}


def class_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the class of a record's quantised tensor; None if it is not a part or capd cannot dequantise it."""
    module, _, kind = str(attributes.get("tensor_class", "")).rpartition(".")
    known = _LIBRARIES.get(module.partition(".")[0], {})
    return kind if kind.removesuffix("Storage") in known and part_names(attributes) else None


def whole_name(name: str, attributes: Mapping[str, Any]) -> str | None:
    """Return the tensor_name of the whole tensor for the tensor_name of a part; None if it is not a part."""
    for part in part_names(attributes):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}")
    return None


def whole_of(tensor_name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return tensor_name, class, dtype and shape of the whole tensor of a part; None if it cannot be dequantised."""
    kind, name = class_of(attributes), whole_name(tensor_name, attributes)
    if kind is None or name is None:
        return None
    dtype, shape = attributes.get("tensor_dtype"), attributes.get("tensor_shape")
    return {"tensor_name": name, "class": kind, "dtype": dtype, "shape": shape}


def dequantised(
    where: str,
    tensor_name: str,
    attributes: Mapping[str, Any],
    captured: Callable[[str], tuple[NDArray[np.generic], str] | None],
) -> tuple[NDArray[np.float32], str]:
    """Return the float32 values and the name of the dtype of a whole tensor.

    Args:
        where: The record of one part, for errors.
        tensor_name: The tensor_name of that part.
        attributes: The attributes of that record.
        captured: Returns the bits and the dtype of the part with a tensor_name at the same moment; None if there is
            none.

    Raises:
        CapdError: A part was not captured, or the class of the tensor is unknown.
        DamagedRecord: An element of a part cannot be read exactly.
    """
    kind, name = class_of(attributes), whole_name(tensor_name, attributes)
    if kind is None or name is None:
        raise CapdError(f"{where}: {_why_not(attributes)}")
    context = context_of(attributes)
    # The context names only what differs from the defaults. Without it, defaults could be used wrongly.
    if context is None:
        raise CapdError(f"{where}: cannot dequantise this {kind}: the context from its class cannot be read")
    shape = tuple(int(size) for size in attributes["tensor_shape"])
    found: dict[str, TensorPart] = {}
    parts = Parts(where, kind, shape, str(attributes["tensor_dtype"]), found, context)
    for part, (part_shape, strides) in part_names(attributes).items():
        one = captured(f"{name}.{part}")
        if one is not None:
            if one[0].shape != part_shape:
                raise parts.problem(
                    f"its part {part!r} was captured with shape {list(one[0].shape)} of {list(part_shape)}"
                )
            found[part] = TensorPart(*one, strides)
        # The part `act_per_tensor_scale` belongs to the activations, not to this tensor.
        elif part != "act_per_tensor_scale":
            raise parts.problem(
                f"no record of its part {part!r} has the same moment; that capture was dropped or not selected"
            )
    compute = _LIBRARIES[str(attributes["tensor_class"]).partition(".")[0]][kind.removesuffix("Storage")]
    try:
        # NaN scales and values beyond float32 are legal.
        with np.errstate(over="ignore", invalid="ignore"):
            values = compute(parts)
    except (ValueError, IndexError, TypeError) as error:
        raise parts.problem(f"its parts do not fit together ({printable(str(error))[:200]})") from error
    if values.shape != shape:
        raise parts.problem(
            f"its parts have shape {list(values.shape)} together, the tensor had {list(shape)}"
        )
    return np.ascontiguousarray(values, np.float32), parts.dtype


def _why_not(attributes: Mapping[str, Any]) -> str:
    if "tensor_class" not in attributes:
        return "it is not a part of a quantised tensor; read it without dequantise"
    if not part_names(attributes):
        return "an older capd captured it, without the layout of the parts; read it without dequantise"
    known = ", ".join(f"{library}'s {', '.join(classes)}" for library, classes in _LIBRARIES.items())
    return f"capd cannot dequantise a {printable(str(attributes['tensor_class']))[:200]}; it can {known}"
