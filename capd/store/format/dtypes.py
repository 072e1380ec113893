"""The stored form of each torch dtype in Zarr, and the numeric values of its bit patterns.

Some Zarr readers do not know every format. Formats that are not universal are stored as bits: bfloat16 as uint16, every
8-bit float and packed fp4 as uint8 (`encoding` "bits"). All other dtypes are stored natively.

A series can keep only the statistics of its tensors (`encoding` "statistics"). Its dtype name is
`statistics_of(dtype)`. It holds one statistics row per record (`capd_client.protocol.statistics_row`), for any shape of
the tensor.

A series can hold what number formats would have cost its tensors (`encoding` "errors"). Its dtype name is
`errors_of(dtype)`. A record is the packed errors of one tensor (`capd.lab.stored_errors`), as bytes.

This module does not use torch. Values follow the formats' definitions:

- fp8: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"
- fnuz: Noune et al. 2022, "8-bit Numerical Formats"
- e8m0, e2m1: OCP Microscaling Formats v1.0, sections 5.3-5.4
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from capd.errors import StoreError
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = [
    "StoredType",
    "errors_of",
    "is_errors",
    "is_statistics",
    "kept_of",
    "statistics_of",
    "stored_shape",
    "stored_type",
    "to_values",
    "value_table",
]

_BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn_x2": "uint8",
}


@dataclass(frozen=True, slots=True)
class StoredType:
    """The stored form of a dtype name.

    Attributes:
        torch: The name of the captured dtype.
        stored: The numpy dtype of the Zarr array.
        encoding: "bits", "native", "statistics" or "errors".
    """

    torch: str
    stored: np.dtype[np.generic]
    encoding: str


_STATISTICS = "statistics:"
_ERRORS = "errors:"


def statistics_of(dtype: str) -> str:
    """Return the dtype name of a series that keeps only the statistics of tensors of torch dtype `dtype`."""
    return f"{_STATISTICS}{dtype}"


def is_statistics(name: str) -> bool:
    """Return whether a series of this dtype name keeps only statistics."""
    return name.startswith(_STATISTICS)


def errors_of(dtype: str) -> str:
    """Return the dtype name of a series that holds the errors of formats on tensors of torch dtype `dtype`."""
    return f"{_ERRORS}{dtype}"


def is_errors(name: str) -> bool:
    """Return whether a series of this dtype name holds the errors of formats."""
    return name.startswith(_ERRORS)


def kept_of(name: str) -> str:
    """Return what a series of this dtype name keeps of each capture: "tensor", "statistics" or "errors"."""
    return "errors" if is_errors(name) else "statistics" if is_statistics(name) else "tensor"


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a record of a series of dtype `name`, for a tensor of `shape`."""
    return (ROW_VALUES,) if is_statistics(name) else shape


@cache
def stored_type(name: str) -> StoredType:
    """Return the stored form of a series' dtype name: a torch dtype's name, or `statistics_of` or `errors_of` one.

    Raises:
        StoreError: The name is not in the table, or the machine is not little-endian.
    """
    dtype = name.removeprefix(_ERRORS if is_errors(name) else _STATISTICS)
    if dtype not in ITEM_NBYTES:
        raise StoreError(f"dtype {dtype!r} cannot be stored; known: {', '.join(sorted(ITEM_NBYTES))}")
    # The arena holds native bytes, and the store is little-endian.
    if sys.byteorder != "little":
        raise StoreError("capd stores little-endian bytes and runs on little-endian machines only")
    if is_statistics(name):
        return StoredType(dtype, np.dtype("float64"), "statistics")
    if is_errors(name):
        return StoredType(dtype, np.dtype("uint8"), "errors")
    bits = _BITS.get(name)
    return StoredType(name, np.dtype(bits or name), "bits" if bits else "native")


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float64]:
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + mantissa, exponent - bias)
    return sign * np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), normal)


def _with_nan(values: NDArray[np.float64], *codes: int) -> NDArray[np.float64]:
    values[list(codes)] = np.nan
    return values


@cache
def value_table(name: str) -> NDArray[np.float64]:
    """Return the float64 values of all bit patterns of an 8- or 16-bit dtype, indexed by unsigned code.

    Returns:
        A read-only array [256] or [65536]. float4_e2m1fn_x2 has [256, 2], with the low nibble first.

    Raises:
        KeyError: The dtype is wider than 16 bits.
    """
    if ITEM_NBYTES[name] == 2:
        codes = np.arange(1 << 16, dtype=np.uint16)
        # Some patterns are signalling NaNs.
        with np.errstate(invalid="ignore"):
            if name == "bfloat16":
                table = (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            else:
                table = codes.view(name).astype(np.float64)
    elif name == "float8_e4m3fn":
        table = _with_nan(_small_float(4, 3, 7), 0x7F, 0xFF)
    elif name == "float8_e5m2":
        with np.errstate(invalid="ignore"):
            table = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float64)
    elif name == "float8_e4m3fnuz":
        table = _with_nan(_small_float(4, 3, 8), 0x80)
    elif name == "float8_e5m2fnuz":
        table = _with_nan(_small_float(5, 2, 16), 0x80)
    elif name == "float8_e8m0fnu":
        table = _with_nan(np.ldexp(1.0, np.arange(256) - 127), 0xFF)
    elif name == "float4_e2m1fn_x2":
        nibble = _small_float(2, 1, 1)
        table = np.stack([nibble[np.arange(256) & 15], nibble[np.arange(256) >> 4]], axis=-1)
    elif name in ("int8", "uint8", "bool"):
        table = np.arange(256, dtype=np.uint8).view("int8" if name == "int8" else "uint8").astype(np.float64)
    else:
        raise KeyError(name)
    table.setflags(write=False)
    return table


def to_values(bits: NDArray[np.generic], name: str) -> NDArray[np.generic]:
    """Return the numbers of a stored array: float32 for formats stored as bits (exact), else the array itself.

    float4_e2m1fn_x2 is unpacked: the last axis doubles (a 0-d array becomes [2]).
    """
    if name not in _BITS:
        return bits
    with np.errstate(invalid="ignore"):
        # Exact, because the formats have 8 or 16 bits.
        values: NDArray[np.float32] = value_table(name)[bits].astype(np.float32)
    if name == "float4_e2m1fn_x2":
        last = bits.shape[-1] if bits.ndim else 1
        # The length is explicit, because -1 is ambiguous if another axis is 0.
        values = values.reshape(*bits.shape[:-1], 2 * last)
    return values
