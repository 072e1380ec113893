"""The quant type of a tensor in a file of another tool, which does not name one."""

from __future__ import annotations

__all__ = ["quant_type_of"]

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def quant_type_of(dtype: str) -> str:
    """Return the word for a tensor's own dtype: bf16, fp16, fp32, or else the dtype's name without "torch."."""
    name = dtype.removeprefix("torch.")
    return _SHORT.get(name, name)
