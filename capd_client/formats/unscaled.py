"""bf16 and fp16: plain 16-bit floats without a scale.

bf16 is S.1.8.7, the upper half of a float32: max 3.39e38, smallest normal 2^-126, smallest subnormal 2^-133. Source:
Google's bfloat16; Intel BFLOAT16 Hardware Numerics Definition, 338302-001. fp16 is S.1.5.10: max 65504, smallest normal
2^-14, smallest subnormal 2^-24. Source: IEEE 754-2019 binary16. Both have Inf and NaN.

Rounding is to nearest with ties to even, or as `rounding` says. Subnormals are kept, zeros keep their sign, and NaN
stays NaN. `overflow` decides about values that round beyond max: `inf` makes them Inf (the rule of IEEE 754),
`saturate` makes them, and Inf, ±max.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.elements import FP16, quantise
from capd_client.formats.spec import Spec

__all__ = ["DTYPES", "unscaled"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_SIGN = -(1 << 31)
_LOW_HALF = 0xFFFF
_INFINITY_BITS = 0x7F800000
_BF16_MAX_BITS = 0x7F7F0000


def unscaled(x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """Return x rounded to the format, in the format's torch dtype."""
    dtype = DTYPES[spec.fmt]
    if x.dtype == dtype and not spec.saturate:
        return x.clone()
    values = x.to(torch.float32)
    if spec.fmt == "bf16":
        return _to_bf16(values, spec, generator)
    grid = quantise(values.clone(), values, FP16, spec.rounding, saturate=spec.saturate, generator=generator)
    # The cast is exact: every value is on the grid.
    return grid.to(dtype)


def _to_bf16(values: torch.Tensor, spec: Spec, generator: Optional[torch.Generator]) -> torch.Tensor:
    # float32 and bf16 have the same exponents, so rounding the pattern rounds normals and subnormals alike.
    bits = values.view(torch.int32)
    magnitude = bits & ~_SIGN
    if spec.rounding == "even":
        added = ((magnitude >> 16) & 1) + 0x7FFF
    elif spec.rounding == "away":
        added = torch.full_like(magnitude, 0x8000)
    else:
        added = torch.randint(
            1 << 16, magnitude.shape, dtype=torch.int32, generator=generator, device=values.device
        )
    finite = magnitude < _INFINITY_BITS
    rounded = torch.where(finite, magnitude + added, magnitude) & ~_LOW_HALF
    if spec.saturate:
        rounded = rounded.clamp(max=_BF16_MAX_BITS)
    rounded = torch.where(values.isnan(), 0x7FC00000, rounded) | (bits & _SIGN)
    # The cast is exact: the lower half is zero.
    return rounded.view(torch.float32).to(torch.bfloat16)
