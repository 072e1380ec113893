"""The element types capd captures, by torch name: the one table that both sides of the wire share.

A name is what `str(torch.dtype)` prints without the `torch.` prefix. No torch import: newer dtypes are
looked up by name where torch is at hand, so an older torch simply never offers them.
"""

from __future__ import annotations

__all__ = ["ITEM_NBYTES", "SUPPORTED_DTYPES"]

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
