"""The table of element types that capd captures, by torch name, shared by both sides of the wire.

A name is the text of `str(torch.dtype)` without the prefix `torch.`. This module does not import torch. Modules that
do look dtypes up by name, so an older torch never offers the newer ones.
"""

from __future__ import annotations

__all__ = ["ITEM_NBYTES", "SUPPORTED_DTYPES", "short_name_of"]

# Bytes of one stored element. float4_e2m1fn_x2 packs two values into its one byte and is kept packed.
ITEM_NBYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}

SUPPORTED_DTYPES = frozenset(ITEM_NBYTES)

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def short_name_of(dtype: str) -> str:
    """Return the quant_type of a tensor of this dtype that has no label: bf16, fp32, fp8, otherwise torch's name."""
    for family in ("float8", "float4"):
        if dtype.startswith(family):
            return "fp" + family[-1]
    return _SHORT.get(dtype, dtype)
