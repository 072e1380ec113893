"""NVFP4: 16 E2M1 elements share one E4M3 scale, and all of a tensor one float32.

Sources: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); TransformerEngine's kernels and
`reference_nvfp4`. Blocks are 1x16 for activations and gradients, tiles 16x16 for weights.

The E2M1 elements are 0 0.5 1 1.5 2 3 4 6 and their negatives, without Inf and NaN. amax_t is the largest magnitude of
the tensor, amax_b that of a block. All arithmetic is in float32:

    S = 448 * 6 / amax_t                     1 where amax_t is 0; at most the largest float32; 1 without tensor_scale
    s_b = e4m3(min(amax_b * (S * (1/6)), 448))    to nearest, ties to even; may be subnormal (from 2^-9) or 0
    q = e2m1(x * min(1 / (s_b * (1/S)), FLT_MAX))    to nearest, ties to even (or as `rounding` says), limited to ±6
    value = q * (s_b * (1/S))

The scale s_b is stored as its byte, and 1/S as `global_scale`. Zeros keep their sign. A block with an Inf or a NaN has
the scale NaN, so all of it decodes to NaN. amax_t covers finite values only, so other blocks are not affected.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.blocks import finite_amax
from capd_client.formats.elements import ELEMENTS, codes_of, decode_table, quantise
from capd_client.formats.scaled import BlockScales
from capd_client.formats.spec import Spec

__all__ = ["Nvfp4Scaling", "nvfp4_multipliers"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_E4M3 = ELEMENTS["e4m3"]
_E2M1 = ELEMENTS["e2m1"]


class Nvfp4Scaling:
    """The scaling of one tensor: an E4M3 scale for each block, under one float32 for all of `rows`."""

    def __init__(self, spec: Spec, rows: torch.Tensor) -> None:
        amax = finite_amax(rows) if spec.tensor_scale else rows.new_zeros((), dtype=torch.float32)
        # Both are tensors, because torch divides a number by a tensor as number * rounded reciprocal.
        encode = (torch.full_like(amax, _E4M3.max_value * _E2M1.max_value) / amax).clamp(max=_FLOAT32_MAX)
        encode = torch.where(amax == 0, 1.0, encode)
        self.global_scale: Optional[torch.Tensor] = 1.0 / encode if spec.tensor_scale else None
        self._decode = 1.0 / encode
        self._to_scale = encode * torch.full_like(encode, 1.0 / _E2M1.max_value)

    def of(self, amax: torch.Tensor) -> BlockScales:
        wanted = amax * self._to_scale
        scales = quantise(wanted.clone(), wanted, _E4M3, "even")
        scales = torch.where(amax.isfinite(), scales, torch.nan)
        after = scales * self._decode
        before = (1.0 / after).clamp(max=_FLOAT32_MAX)
        return BlockScales(codes_of(scales, _E4M3), before, after)


def nvfp4_multipliers(stored: torch.Tensor, global_scale: Optional[torch.Tensor]) -> torch.Tensor:
    """Return the multipliers of decoded elements, float32, from the stored bytes and the tensor's scale."""
    scales = decode_table(_E4M3, stored.device)[stored.to(torch.int64)]
    return scales if global_scale is None else scales * global_scale
