"""The values of all bit patterns of the 8- and 16-bit dtypes, by torch's own conversion."""

from __future__ import annotations

import torch

__all__ = ["values_of_codes"]


def values_of_codes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return float32 values by unsigned code: [256, 1] or [65536, 1]; [256, 2] for packed fp4, low nibble first.

    The table is computed on the device, because a copy from the host would make the host wait.
    """
    codes = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32, device=device)
    if dtype is getattr(torch, "float4_e2m1fn_x2", None):
        return torch.stack([_e2m1(codes.bitwise_and(15)), _e2m1(codes.bitwise_right_shift(4))], dim=-1)
    # A bool byte that is neither 0 nor 1 counts with its own value.
    if dtype is torch.bool:
        return codes.to(torch.float32)[:, None]
    words = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return words.view(dtype).to(torch.float32)[:, None]


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of E2M1 codes.

    Source: OCP Microscaling Formats v1.0, section 5.3.3: a sign, two bits of exponent with bias 1, one bit of mantissa.
    """
    exponent, mantissa = codes.bitwise_right_shift(1).bitwise_and(3), codes.bitwise_and(1)
    quarters = torch.where(exponent > 0, mantissa.add(2).bitwise_left_shift(exponent), mantissa.mul(2))
    return torch.where(codes >= 8, quarters.neg(), quarters).to(torch.float32).div_(4)
