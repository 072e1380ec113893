"""How each torch dtype lies in Zarr, and what its bit patterns are worth.

Formats that some Zarr reader does not know are stored as bits: bfloat16 as uint16, every 8-bit float and
packed fp4 as uint8 (`encoding` "bits"); the rest is stored natively. A series that keeps only the statistics of
its tensors (`encoding` "statistics") has a name of its own, `statistics_of(dtype)`, and holds one statistics row per
record (`capd_client.protocol.statistics_row`), whatever the tensor's shape. No torch here: values come from the
formats' definitions (fp8: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; fnuz: Noune et al. 2022,
"8-bit Numerical Formats"; e8m0, e2m1: OCP Microscaling Formats v1.0, sections 5.3-5.4).
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
    "is_statistics",
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
    """torch: name of the captured dtype. stored: numpy dtype of the Zarr array. encoding: "bits", "native" or
    "statistics"."""

    torch: str
    stored: np.dtype[np.generic]
    encoding: str


_STATISTICS = "statistics:"


def statistics_of(dtype: str) -> str:
    """The dtype name of a series that keeps only the statistics of tensors of torch dtype `dtype`."""
    return f"{_STATISTICS}{dtype}"


def is_statistics(name: str) -> bool:
    """Whether a series of this dtype name keeps only statistics."""
    return name.startswith(_STATISTICS)


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a tensor of `shape` takes of the array of a series of this dtype name."""
    return (ROW_VALUES,) if is_statistics(name) else shape


@cache
def stored_type(name: str) -> StoredType:
    """The stored form of a series' dtype name: that of a torch dtype, or of the statistics of one.

    Raises StoreError for a name outside the table.
    """
    dtype = name.removeprefix(_STATISTICS)
    if dtype not in ITEM_NBYTES:
        raise StoreError(f"dtype {dtype!r} cannot be stored; known: {', '.join(sorted(ITEM_NBYTES))}")
    if sys.byteorder != "little":  # the arena holds native bytes and the store is little-endian
        raise StoreError("capd stores little-endian bytes and runs on little-endian machines only")
    if is_statistics(name):
        return StoredType(dtype, np.dtype("float64"), "statistics")
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
    """float64 values of all bit patterns of an 8- or 16-bit dtype, indexed by unsigned code.

    Shape [256] or [65536]; for float4_e2m1fn_x2 [256, 2], the low nibble first. Raises KeyError for wider dtypes.
    """
    if ITEM_NBYTES[name] == 2:
        codes = np.arange(1 << 16, dtype=np.uint16)
        with np.errstate(invalid="ignore"):  # signalling NaN patterns
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
    """Numbers of a stored array: float32 for formats kept as bits (exact), otherwise the array itself.

    float4_e2m1fn_x2 unpacks: the last axis doubles (a 0-d array becomes [2]).
    """
    if name not in _BITS:
        return bits
    with np.errstate(invalid="ignore"):
        values: NDArray[np.float32] = value_table(name)[bits].astype(np.float32)  # exact for 8 and 16 bits
    if name == "float4_e2m1fn_x2":
        last = bits.shape[-1] if bits.ndim else 1
        values = values.reshape(*bits.shape[:-1], 2 * last)  # not -1, which other axes of 0 leave open
    return values
