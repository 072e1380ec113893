"""HiFloat8 ("hifp8"): one byte with a tapered precision, without a scale.

Source: Luo et al., "Ascend HiFloat8 Format for Deep Learning" (arXiv 2409.16626). A prefix code, the dot, tells how
many bits the exponent takes. The remaining bits are the mantissa:

| codes | exponent E | mantissa bits | magnitudes |
|---|---|---|---|
| 00, 80 | | | +0, NaN |
| 01-07 | -22 … -16 | 0 | 2^-22 … 2^-16 |
| 08-0F | 0 | 3 | 1 … 1.875 |
| 10-17, 18-1F | 1, -1 | 3 | 2 … 3.75, 0.5 … 0.9375 |
| 20-2F, 30-3F | 2 3, -2 -3 | 3 | 4 … 15, 0.125 … 0.46875 |
| 40-4F, 50-5F | 4 … 7, -4 … -7 | 2 | 16 … 224, 2^-7 … 0.109375 |
| 60-6E, 70-7F | 8 … 15, -8 … -15 | 1 | 256 … 32768, 2^-15 … 1.5 * 2^-8 |
| 6F | | | Inf |

Bit 80 is the sign. Zero has no sign: -0 and values that round to zero become +0. NaN is 80. Rounding:

- `away` (the paper's TA, the default): to nearest, ties away from zero. |x| < 2^-23 is 0, [2^-23, 2^-22) is 2^-22.
- `hybrid` (CAST_HYBRID): TA for |E| < 4. Elsewhere the value's own low bits make a pseudo-random choice. A float32 is
  rounded up if its 14 highest discarded bits are at least its 14 lowest bits. fp16 has fewer bits: it is rounded up if
  the two highest discarded bits are at least 2 * (lowest bit) + 1. Values of the format do not change. No public source
  describes bf16, so it follows the rule of fp16. |x| in [2^-23, 2^-22) takes part, with 0 and 2^-22 as neighbours.
- `stochastic`: up with the probability of the discarded part.

Overflow: magnitudes that round to 1.5 * 2^15 or more (TA: from 40960), and Inf, become Inf under `inf` and ±32768
under `saturate`.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.spec import Spec
from capd_client.formats.tables import cached

__all__ = ["hif8_codes", "hif8_table", "hif8_values"]

NAN_CODE, INFINITY_CODE = 0x80, 0x6F
MIN_EXPONENT, MAX_EXPONENT = -22, 15

_BIAS = 127
_MANTISSA_WIDTH = 23
_SIGN = -(1 << 31)
# The binade of the values between zero and the smallest value of the format.
_HALVING_FIELD = MIN_EXPONENT - 1 + _BIAS
_SMALLEST_BITS = (MIN_EXPONENT + _BIAS) << _MANTISSA_WIDTH
_INFINITY_BITS = 0x7F800000
_MAX_BITS = (MAX_EXPONENT + _BIAS) << _MANTISSA_WIDTH
# 1.25 * 2**15: TA and hybrid round to Inf from here.
_OVERFLOW_BITS = 0x47200000


def mantissa_bits(exponent: int) -> int:
    """Return the number of mantissa bits of a value with this exponent."""
    size = abs(exponent)
    return 3 if size <= 3 else 2 if size <= 7 else 1 if size <= 15 else 0


def first_code(exponent: int) -> int:
    """Return the code of 2**exponent."""
    size = abs(exponent)
    if exponent < -15:
        return exponent + 23
    if size == 0:
        return 0x08
    # The exponent's bits are its sign and the bits after the leading one.
    width = size.bit_length()
    start = {1: 0x10, 2: 0x20, 3: 0x40, 4: 0x60}[width]
    half = 1 << (width - 1)
    return start + ((size - half) + half * (exponent < 0) << mantissa_bits(exponent))


@cached
def hif8_table(device: torch.device) -> torch.Tensor:
    """Return the values of all codes, float32 [256]."""
    values = [0.0] * 128
    for exponent in range(MIN_EXPONENT, MAX_EXPONENT + 1):
        steps = 1 << mantissa_bits(exponent)
        for step in range(steps):
            values[first_code(exponent) + step] = 2.0**exponent * (1 + step / steps)
    values[INFINITY_CODE] = float("inf")
    negative = [-value for value in values]
    negative[0] = float("nan")
    return torch.tensor(values + negative, dtype=torch.float32, device=device)


@cached
def _by_field(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the dropped mantissa bits and the first code of each exponent field of float32; both int32 [256]."""
    exponents = [min(max(field - _BIAS, MIN_EXPONENT), MAX_EXPONENT) for field in range(256)]
    drops = [_MANTISSA_WIDTH - mantissa_bits(exponent) for exponent in exponents]
    codes = [first_code(exponent) for exponent in exponents]
    codes[: _HALVING_FIELD + 1] = [0] * (_HALVING_FIELD + 1)
    return (
        torch.tensor(drops, dtype=torch.int32, device=device),
        torch.tensor(codes, dtype=torch.int32, device=device),
    )


def hif8_values(x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """Round x to values of the format.

    Args:
        x: A floating-point tensor of any shape. "hybrid" looks at the bits of x's own dtype.
        spec: A hifp8 spec; its rounding and overflow apply.
        generator: Source of the random bits of "stochastic"; None is torch's default generator of the device.

    Returns:
        float32 of x's shape.
    """
    values = x.to(torch.float32)
    bits = values.view(torch.int32)
    magnitude = bits & ~_SIGN
    field = magnitude >> _MANTISSA_WIDTH
    drop = _by_field(x.device)[0][field.to(torch.int64)]
    rounded = (magnitude + _added(x, magnitude, field, drop, spec.rounding, generator)) >> drop << drop
    tiny = _is_up(x, magnitude, spec.rounding, generator).to(torch.int32) * _SMALLEST_BITS
    rounded = torch.where(field <= _HALVING_FIELD, tiny, rounded)
    largest = _MAX_BITS if spec.saturate else _INFINITY_BITS
    rounded = torch.where(rounded > _MAX_BITS, largest, rounded)
    signed = torch.where(rounded == 0, 0, rounded | (bits & _SIGN))
    return torch.where(values.isnan(), torch.nan, signed.view(torch.float32))


def _added(
    x: torch.Tensor,
    magnitude: torch.Tensor,
    field: torch.Tensor,
    drop: torch.Tensor,
    rounding: str,
    generator: Optional[torch.Generator],
) -> torch.Tensor:
    """Return the number to add to a pattern before its low `drop` bits are cut off."""
    one = torch.ones_like(drop)
    half = one << (drop - 1)
    if rounding == "away":
        return half
    below = (one << drop) - 1
    if rounding == "stochastic":
        noise = torch.randint(1 << 24, drop.shape, dtype=torch.int32, generator=generator, device=x.device)
        return noise & below
    discarded = magnitude & below
    if x.dtype == torch.float32:
        up = (discarded >> (drop - 14)) >= (magnitude & 0x3FFF)
    else:
        up = (discarded >> (drop - 2)) >= 2 * _lowest_bit(x) + 1
    whole = torch.where(up & (discarded != 0), below, 0)
    return torch.where(((field - _BIAS).abs() < 4) | (magnitude >= _OVERFLOW_BITS), half, whole)


def _is_up(
    x: torch.Tensor, magnitude: torch.Tensor, rounding: str, generator: Optional[torch.Generator]
) -> torch.Tensor:
    """Whether a magnitude below 2**-22 rounds up to 2**-22 instead of down to 0."""
    halving = (magnitude >> _MANTISSA_WIDTH) == _HALVING_FIELD
    if rounding == "away":
        return halving
    if rounding == "stochastic":
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)
        return noise < magnitude.view(torch.float32) * 2.0**-MIN_EXPONENT
    fraction = magnitude & 0x7FFFFF
    if x.dtype == torch.float32:
        return halving & ((fraction >> 10) + (1 << 13) >= (fraction & 0x3FFF))
    return halving & (2 + (fraction >> 22) >= 2 * _lowest_bit(x) + 1)


def _lowest_bit(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int16) & 1).to(torch.int32)


def hif8_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of float32 values that the format represents exactly, uint8."""
    bits = values.view(torch.int32)
    magnitude = bits & ~_SIGN
    field = (magnitude >> _MANTISSA_WIDTH).to(torch.int64)
    drops, codes = _by_field(values.device)
    found = codes[field] + ((magnitude & 0x7FFFFF) >> drops[field])
    found = (
        torch.where(values.isinf(), INFINITY_CODE, found) | ((bits < 0) & (found != 0)).to(torch.int32) << 7
    )
    return torch.where(values.isnan(), NAN_CODE, found).to(torch.uint8)
