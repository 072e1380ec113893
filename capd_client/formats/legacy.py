"""The preset `legacy`: the results of the predecessor's quantisers, a fork of Megatron-LM (`quant/mxfp.py`,
`quant/hifp.py`).

Its MX code is microxcaling's, with the floor scale, elements rounded to nearest with ties away from zero, and Inf and
NaN not put back; mxfp8 is e5m2 unless told otherwise. Its hifp8 limits magnitudes to 2^-22 … 0.95 * 2^15 and then
rounds ties away: what is not zero never becomes zero, and overflow and Inf become ±32768. Both compute in the
tensor's own dtype, whose rounding shows: log2 in bf16 takes 255/256 of a large power of two for that power. So the
same operations run here in the same dtype, one after the other. MX of fp16 runs in float32: in fp16 most of its
scales are 0 or Inf.
"""

from __future__ import annotations

import torch

from capd_client.formats.elements import Element, codes_of
from capd_client.formats.hif8 import hif8_codes
from capd_client.formats.scaled import element_of
from capd_client.formats.spec import Spec

__all__ = ["legacy_hif8_codes", "legacy_hif8_values", "legacy_mx_codes", "legacy_mx_values"]

_SMALLEST_NORMAL = 2.0**-126  # stands in for the largest magnitude of a block of zeros
_SCALE_LIMIT = 127


def legacy_mx_values(rows: torch.Tensor, spec: Spec) -> torch.Tensor:
    """rows [blocks, values of a block], quantised and dequantised, in their dtype."""
    elements, exponents = _quantised(rows, element_of(spec))
    return (elements * 2**exponents).to(rows.dtype)


def legacy_mx_codes(rows: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 like rows, and E8M0 bytes [blocks, 1]."""
    element = element_of(spec)
    elements, exponents = _quantised(rows, element)
    stored = torch.where(exponents.isnan(), 255.0, exponents.to(torch.float32) + 127)
    return codes_of(elements.to(torch.float32), element), stored.to(torch.uint8)


def _quantised(rows: torch.Tensor, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements before their scale is multiplied back, and its exponents [blocks, 1]."""
    if rows.dtype == torch.float16:
        rows = rows.to(torch.float32)
    amax = rows.abs().amax(-1, keepdim=True)
    exponents = (amax + _SMALLEST_NORMAL * (amax == 0).to(rows.dtype)).log2().floor() - element.max_exponent
    exponents[exponents > _SCALE_LIMIT] = torch.nan
    exponents[exponents < -_SCALE_LIMIT] = -_SCALE_LIMIT
    scaled = rows / 2**exponents
    own = (scaled.abs() + (scaled == 0).to(rows.dtype)).log2().floor().clip(min=element.min_exponent)
    steps = scaled / 2**own * 2**element.mantissa_bits
    whole = steps.sign() * (steps.abs() + 0.5).floor()
    rounded = whole / 2**element.mantissa_bits * 2**own
    return rounded.clamp(-element.max_value, element.max_value), exponents


def legacy_hif8_values(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """x quantised and dequantised, in its dtype."""
    magnitude = x.abs().clamp(min=2**-22, max=0.95 * 2**15)
    guard = 2**-14 if x.dtype == torch.float16 else 2**-45
    exponents = (magnitude + guard).log2().floor()
    size = exponents.abs()
    bits = (size <= 15).to(x.dtype) + (size <= 7).to(x.dtype) + (size <= 3).to(x.dtype)
    return (magnitude * 2.0 ** (bits - exponents) + 0.5).floor() * 2.0 ** (exponents - bits) * x.sign()


def legacy_hif8_codes(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The codes of `legacy_hif8_values`."""
    return hif8_codes(legacy_hif8_values(x, spec).to(torch.float32))
