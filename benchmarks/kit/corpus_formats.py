"""The quantised forms of a tensor in the corpus: fp8 with one scale, and the MX block formats."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fp8", "mx"]

# Elements with one scale in the MX formats.
BLOCK = 32
E8M0_BIAS = 127
# The midpoints between the magnitudes of e2m1, codes 0 to 7.
FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Exponent of the largest normal number: the MX scale is 2^(floor(log2(absmax)) - this).
MAX_EXPONENT = {"float8_e4m3fn": 8, "float4_e2m1fn_x2": 2}


def fp8(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in an 8-bit float format as uint8, of the same shape.

    Its absmax is scaled to the largest number.
    """
    values = tensor.float()
    largest = torch.finfo(dtype).max
    scale = largest / values.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return (values * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)


def mx(tensor: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Return payload and scales (both uint8) of `tensor`, whose last axis is a multiple of 32.

    Args:
        dtype: "float8_e4m3fn" (the payload has the tensor's shape) or "float4_e2m1fn_x2" (two codes per byte, the
            first in the low half). Scales are e8m0 bytes [..., last // 32].
    """
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    # absmax = mantissa * 2^exponent, 0.5 <= mantissa < 1.
    _, exponent = blocks.abs().amax(-1).frexp()
    scales = (exponent - 1 - MAX_EXPONENT[dtype] + E8M0_BIAS).clamp(0, 2 * E8M0_BIAS)
    scaled = blocks / torch.exp2((scales - E8M0_BIAS).float()).unsqueeze(-1)
    if dtype == "float8_e4m3fn":
        largest = torch.finfo(torch.float8_e4m3fn).max
        payload = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        magnitude = torch.bucketize(scaled.abs(), torch.tensor(FP4_MIDPOINTS)).to(torch.uint8)
        codes = magnitude | (scaled.signbit().to(torch.uint8) << 3)
        payload = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return payload.flatten(-2), scales.to(torch.uint8)
