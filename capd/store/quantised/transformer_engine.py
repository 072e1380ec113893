"""The classes of TransformerEngine: Float8Tensor, MXFP8Tensor, NVFP4Tensor and Float8BlockwiseQTensor.

Source: NVIDIA/TransformerEngine, `pytorch/tensor/*.py` and `pytorch/tensor/storage/*.py`,
`common/cast/{mxfp8,nvfp4}/dequantize_*.cuh`, `tests/cpp/operator/test_swizzle.cu`. Decoding multiplies by the scales.
Versions without `with_gemm_swizzled_scales` never keep swizzled scales.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import value_table
from capd.store.quantised.layouts import Values, of_blocks, rows_of, unpacked_fp4, unswizzled
from capd.store.quantised.parts import Parts

__all__ = ["CLASSES"]

# The values of NVTEDType in transformer_engine.h.
_ELEMENTS = {7: "float8_e4m3fn", 8: "float8_e5m2"}
_MX_BLOCK, _NVFP4_BLOCK, _FP8_BLOCK = 32, 16, 128
_LAYOUT = "GEMM_READY"
_E2M1_MAX = np.float32(6)


def _float8(parts: Parts) -> Values:
    elem = _element(parts)
    scale = parts.part("scale_inv", "fp8_scale_inv").values().reshape(())
    if parts.has("data"):
        return parts.part("data").values(elem) * scale
    # Its shape is [last, *leading].
    turned = parts.part("transpose", "data_transpose").values(elem)
    return (np.moveaxis(turned, 0, -1) if turned.ndim else turned) * scale


def _mxfp8(parts: Parts) -> Values:
    elem = _element(parts)
    if parts.has("rowwise_data"):
        values = rows_of(parts.part("rowwise_data").values(elem))
        rows, columns = values.shape
        codes = _scales(parts, "rowwise_scale_inv", rows, columns // _MX_BLOCK)
        block = (1, _MX_BLOCK)
    else:
        # Columnwise data are not transposed. Columnwise scales are transposed only in the swizzled form.
        values = rows_of(parts.part("columnwise_data").values(elem))
        rows, columns = values.shape
        codes = _scales(parts, "columnwise_scale_inv", rows // _MX_BLOCK, columns, turned=True)
        block = (_MX_BLOCK, 1)
    scales = value_table("float8_e8m0fnu")[codes.view(np.uint8)].astype(np.float32)
    return of_blocks(values, scales, block).reshape(parts.shape)


def _nvfp4(parts: Parts) -> Values:
    by_row = parts.has("rowwise_data")
    if not by_row and parts.context.get("with_rht") is not False:
        raise parts.problem(
            "it has only columnwise data, which may be the tensor's random Hadamard transform with other values"
        )
    side = "rowwise" if by_row else "columnwise"
    # The shape is [*leading, K] by rows and [K, *leading] by columns.
    values = unpacked_fp4(parts.part(f"{side}_data").bits)
    flat = rows_of(values) if by_row else values.reshape(values.shape[0], -1)
    codes = _scales(parts, f"{side}_scale_inv", flat.shape[0], ceil(flat.shape[1] / _NVFP4_BLOCK))
    amax = parts.part(f"amax_{side}").values().reshape(-1, 1)
    if amax.size != (flat.shape[0] if parts.context.get("row_scaled_nvfp4") else 1):
        raise parts.problem(f"it has {amax.size} amax for {flat.shape[0]} rows")
    largest = parts.context.get("nvfp4_e4m3_max", 448)
    if largest not in (448, 256):
        raise parts.problem(f"its largest scale is {largest!r}")
    # TransformerEngine's kernel computes in this order, which decides the rounding.
    whole = np.float32(1) / (_E2M1_MAX * np.float32(largest))
    scales = value_table("float8_e4m3fn")[codes.view(np.uint8)].astype(np.float32) * amax * whole
    found = of_blocks(flat, scales.astype(np.float32), (1, _NVFP4_BLOCK))
    return found.reshape(parts.shape) if by_row else _turned_back(found.reshape(values.shape))


def _blockwise(parts: Parts) -> Values:
    elem, by_tile = _element(parts), parts.flag("is_2D_scaled")
    # Only versions before 2.12 have it.
    layout = str(parts.context.get("data_format", _LAYOUT))
    if not layout.endswith(_LAYOUT):
        raise parts.problem(f"its data_format is {layout!r}, capd knows {_LAYOUT}")
    side = "rowwise" if parts.has("rowwise_data") else "columnwise"
    # The shape is [*leading, K] by rows and [K, *leading] by columns.
    values = parts.part(f"{side}_data").values(elem)
    flat = rows_of(values) if side == "rowwise" else values.reshape(values.shape[0], -1)
    scales = parts.part(f"{side}_scale_inv").values()
    # Scales of rows are [blocks, rows], transposed relative to the data.
    found = of_blocks(flat, scales if by_tile else scales.T, (_FP8_BLOCK if by_tile else 1, _FP8_BLOCK))
    return found.reshape(values.shape) if side == "rowwise" else _turned_back(found.reshape(values.shape))


def _turned_back(values: Values) -> Values:
    return np.moveaxis(values, 0, -1)


def _scales(parts: Parts, name: str, rows: int, columns: int, *, turned: bool = False) -> NDArray[np.generic]:
    """Return the codes of the scales [rows, columns] without padding. turned: swizzled scales are transposed."""
    bits = parts.part(name).bits
    if not parts.context.get("with_gemm_swizzled_scales", False):
        return bits[:rows, :columns]
    return unswizzled(bits, columns, rows).T if turned else unswizzled(bits, rows, columns)


def _element(parts: Parts) -> str:
    """Return the dtype of the elements. Versions give the name or the number of an enumeration."""
    said = parts.said("fp8_dtype")
    found = _ELEMENTS.get(said) if isinstance(said, int) else None
    for mark, dtype in (("E4M3", "float8_e4m3fn"), ("E5M2", "float8_e5m2")):
        found = dtype if mark in str(said) else found
    if found is None:
        raise parts.problem(f"its elements are {said!r}")
    return found


CLASSES: dict[str, Callable[[Parts], Values]] = {
    "Float8Tensor": _float8,
    "MXFP8Tensor": _mxfp8,
    "NVFP4Tensor": _nvfp4,
    "Float8BlockwiseQTensor": _blockwise,
}
