"""From a record of one part to the values of the tensor that it is a part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.store.quantised import torchao, transformer_engine
from capd.store.quantised.parts import ATTRIBUTES, Part, PartRecord, Parts, PartSeries, context_of, part_names
from capd_client.process.text import printable
from capd_client.protocol.key import Moment

__all__ = ["class_of", "dequantised", "whole_name", "whole_of"]

_LIBRARIES: dict[str, Mapping[str, Callable[[Parts], NDArray[np.float32]]]] = {
    "torchao": torchao.CLASSES,
    "transformer_engine": transformer_engine.CLASSES,
}


def class_of(attributes: Mapping[str, Any]) -> str | None:
    """The class of the quantised tensor that a record is a part of, if capd can dequantise it; else None."""
    module, _, kind = str(attributes.get("tensor_class", "")).rpartition(".")
    known = _LIBRARIES.get(module.partition(".")[0], {})
    return kind if kind.removesuffix("Storage") in known and part_names(attributes) else None


def whole_name(name: str, attributes: Mapping[str, Any]) -> str | None:
    """The tensor_name of the tensor that the part of this tensor_name belongs to; None where it is no part."""
    for part in part_names(attributes):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}")
    return None


def whole_of(tensor_name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a part dequantises to: tensor_name, class, dtype and shape of the whole; None where it is no such part."""
    kind, name = class_of(attributes), whole_name(tensor_name, attributes)
    if kind is None or name is None:
        return None
    dtype, shape = attributes.get("tensor_dtype"), attributes.get("tensor_shape")
    return {"tensor_name": name, "class": kind, "dtype": dtype, "shape": shape}


def dequantised(series: PartSeries, number: int) -> tuple[NDArray[np.float32], str]:
    """The values of the tensor that record `number` of this series is a part of, float32, and its dtype's name.

    Its other parts are looked for at the same moment. Raises CapdError where one was not captured, or where the tensor
    is of no class that is known; DamagedRecord rather than give a wrong value.
    """
    record = series.record(number)
    attributes, name = record.attributes, whole_name(series.key.tensor_name, record.attributes)
    where = f"{series.path}#{number}"
    kind = class_of(attributes)
    if kind is None or name is None:
        raise CapdError(f"{where}: {_why_not(attributes)}")
    context = context_of(attributes)
    if context is None:  # what it says only where it differs from what is usual would be taken for usual
        raise CapdError(f"{where}: cannot dequantise this {kind}: what its class said of it cannot be read")
    found = {part: _part(series, record, f"{name}.{part}", part) for part in part_names(attributes)}
    shape = tuple(int(size) for size in attributes["tensor_shape"])
    have = {part: one for part, one in found.items() if one is not None}
    parts = Parts(where, kind, shape, str(attributes["tensor_dtype"]), have, context)
    for part, one in found.items():
        if one is None and part != "act_per_tensor_scale":  # of the activations, not of this tensor
            raise parts.problem(
                f"no record of its part {part!r} has the same moment; it was dropped, or left out"
            )
    compute = _LIBRARIES[str(attributes["tensor_class"]).partition(".")[0]][kind.removesuffix("Storage")]
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # NaN scales, and values beyond float32
            values = compute(parts)
    except (ValueError, IndexError, TypeError) as error:
        raise parts.problem(f"its parts do not fit together ({printable(str(error))[:200]})") from error
    if values.shape != shape:
        raise parts.problem(f"its parts make {list(values.shape)}, it was {list(shape)}")
    return np.ascontiguousarray(values, np.float32), parts.dtype


def _why_not(attributes: Mapping[str, Any]) -> str:
    if "tensor_class" not in attributes:
        return "it is no part of a quantised tensor; read it without dequantise"
    if not part_names(attributes):
        return "it was captured by an older capd, which did not note how the parts of a quantised tensor lie"
    known = ", ".join(f"{library}'s {', '.join(classes)}" for library, classes in _LIBRARIES.items())
    return f"capd cannot dequantise a {printable(str(attributes['tensor_class']))[:200]}; it can {known}"


def _part(series: PartSeries, record: PartRecord, tensor_name: str, part: str) -> Part | None:
    """The part of this name at the record's moment; None where there is none."""
    shape, strides = part_names(record.attributes)[part]
    candidates = [one for one in series.siblings if one.key.tensor_name == tensor_name]
    candidates.sort(
        key=lambda one: one.key.quant_type != series.key.quant_type
    )  # labels of dtypes differ by part
    for one in candidates:
        number = _number_at(one, record)
        if number is None:
            continue
        if one.kept != "tensor":
            raise CapdError(
                f"{one.path}: statistics alone were kept of this part, so nothing can be dequantised"
            )
        bits = one.read(number)
        if bits.shape != shape:
            raise CapdError(
                f"{one.path}#{number}: {list(bits.shape)} is not the whole part, which was {list(shape)}"
            )
        return Part(bits, one.dtype, strides)
    return None


def _number_at(series: PartSeries, record: PartRecord) -> int | None:
    """The record of another part that was captured together with this one."""
    numbers = series.numbers
    first = [record.index] if record.index in numbers else []
    for number in (*first, *numbers):
        other = series.record(number)
        if _moment(other) == _moment(record) and all(
            other.attributes.get(name) == record.attributes.get(name) for name in ATTRIBUTES
        ):
            return number
    return None


def _moment(record: PartRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in Moment.__struct_fields__)
