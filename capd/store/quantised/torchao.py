"""The classes of torchao: MXTensor, NVFP4Tensor, Float8Tensor and Float8TrainingTensor.

Source: pytorch/ao, `prototype/mx_formats/{mx_tensor,nvfp4_tensor}.py`, `quantization/quantize_/workflows/float8`,
`float8/float8_training_tensor.py`. Everything is computed in float32, as in the library. A scale of MXTensor is rounded
to the tensor's dtype first, as in the library: in float16, a scale above 2^15 is Inf, and one below 2^-24 is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import value_table
from capd.store.quantised.layouts import Values, of_blocks, rows_of, unpacked_fp4, unswizzled
from capd.store.quantised.parts import Parts, TensorPart

__all__ = ["CLASSES"]

_FP6 = {"fp6_e2m3": (2, 3, 1), "fp6_e3m2": (3, 2, 3)}


def _mx(parts: Parts) -> Values:
    data, scale = parts.part("qdata"), parts.part("scale")
    turned = _is_turned(parts, data)
    rows, columns = _rows_and_columns(parts, turned)
    block = parts.number("block_size")
    values = rows_of(_mx_elements(parts, _as_laid(data.bits, turned)))
    scales = _scales(parts, scale, turned, (rows, columns // block))
    each = value_table("float8_e8m0fnu")[scales.view(np.uint8)]
    if parts.dtype == "float16":
        each = each.astype(np.float16)
    found = of_blocks(values, each.astype(np.float32), (1, block))
    return _shaped(parts, found, turned)


def _mx_elements(parts: Parts, codes: NDArray[np.generic]) -> Values:
    elem = str(parts.said("elem_dtype")).removeprefix("torch.")
    if elem == "float4_e2m1fn_x2":
        return unpacked_fp4(codes)
    if elem in _FP6:
        return _fp6_table(*_FP6[elem])[codes.view(np.uint8)]
    if elem not in ("float8_e4m3fn", "float8_e5m2"):
        raise parts.problem(f"its elements are {elem}")
    return value_table(elem)[codes.view(np.uint8)].astype(np.float32)


def _fp6_table(exponent_bits: int, mantissa_bits: int, bias: int) -> Values:
    """Return the values of all bytes with a six-bit code in their low bits (OCP Microscaling Formats v1.0)."""
    codes = np.arange(256) & 63
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    return np.where(codes >> 5, -size, size).astype(np.float32)


def _nvfp4(parts: Parts) -> Values:
    data, scale = parts.part("qdata"), parts.part("scale")
    turned = _is_turned(parts, data)
    rows, columns = _rows_and_columns(parts, turned)
    block = parts.number("block_size")
    codes = _scales(parts, scale, turned, (rows, columns // block))
    scales = value_table("float8_e4m3fn")[codes.view(np.uint8)].astype(np.float32)
    # One scale for the whole tensor, or one for each of its matrices, [E, 1, 1].
    if parts.has("per_tensor_scale"):
        whole = parts.part("per_tensor_scale").values()
        each = np.repeat(whole.reshape(-1), rows // max(1, whole.size))[:, None]
        scales = each.astype(np.float32) * scales
    found = of_blocks(rows_of(unpacked_fp4(_as_laid(data.bits, turned))), scales, (1, block))
    return _shaped(parts, found, turned)


def _float8(parts: Parts) -> Values:
    values, scale = parts.part("qdata").values(), parts.part("scale").values()
    if scale.size == 1:
        return values * scale.reshape(())
    if scale.ndim != values.ndim or any(
        size % max(1, count) for size, count in zip(values.shape, scale.shape, strict=True)
    ):
        raise parts.problem(f"scales {list(scale.shape)} do not divide it")
    for axis, (size, count) in enumerate(zip(values.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // max(1, count), axis)
    return values * scale


def _float8_training(parts: Parts) -> Values:
    """Divide by the scale: encoding multiplied by it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (parts.part("data").values() / parts.part("scale").values()).astype(np.float32)


def _is_turned(parts: Parts, data: TensorPart) -> bool:
    """Return whether the last two axes are transposed. Blocks and packed pairs then run along the second last axis."""
    return len(data.strides) > 1 and data.strides[-2] < data.strides[-1]


def _as_laid(bits: NDArray[np.generic], turned: bool) -> NDArray[np.generic]:
    return np.ascontiguousarray(bits.swapaxes(-1, -2)) if turned else bits


def _rows_and_columns(parts: Parts, turned: bool) -> tuple[int, int]:
    *leading, rows, columns = (1, 1, *parts.shape)
    rows, columns = (columns, rows) if turned else (rows, columns)
    return prod(leading) * rows, columns


def _scales(parts: Parts, scale: TensorPart, turned: bool, shape: tuple[int, int]) -> NDArray[np.generic]:
    """Return the codes of the scales [rows, blocks]. The rows of all matrices follow one another."""
    bits = _as_laid(scale.bits, turned and scale.bits.ndim > 1)
    return unswizzled(bits, *shape) if parts.said("is_swizzled_scales") else bits.reshape(shape)


def _shaped(parts: Parts, found: Values, turned: bool) -> Values:
    *leading, rows, columns = parts.shape
    return found.reshape(*leading, columns, rows).swapaxes(-1, -2) if turned else found.reshape(parts.shape)


CLASSES: dict[str, Callable[[Parts], Values]] = {
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
    "Float8Tensor": _float8,
    "Float8TrainingTensor": _float8_training,
}
