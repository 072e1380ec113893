"""torchao as an oracle: it warns at import of kernels that are not there, which says nothing about formats."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    finally:
        logging.disable(logging.NOTSET)

MX_ELEMENTS: dict[str, Any] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m3": mx_tensor.DTYPE_FP6_E2M3,
    "e3m2": mx_tensor.DTYPE_FP6_E3M2,
    "e2m1": torch.float4_e2m1fn_x2,
}


def mx_through_torchao(rows: torch.Tensor, elem: str, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0 bytes and decoded values, float32, in blocks of 32 along the last axis."""
    scale, payload = mx_tensor.to_mx(rows, MX_ELEMENTS[elem], 32, ScaleCalculationMode(mode))
    values = mx_tensor.to_dtype(payload, scale, MX_ELEMENTS[elem], 32, torch.float32)
    return scale.view(torch.uint8), values


def nvfp4_through_torchao(
    rows: torch.Tensor, tensor_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 bytes [rows, blocks] and the elements' values before any scale, float32."""
    scale, payload = nvfp4_tensor.nvfp4_quantize(rows, 16, tensor_scale)
    elements = f4_unpacked_to_f32(unpack_uint4(payload)).reshape(rows.shape)
    return scale.view(torch.uint8).reshape(rows.shape[0], -1), elements
