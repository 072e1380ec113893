"""The preset `legacy`: the results of the quantisers in tensor_saver's fork of Megatron-LM.

Sources: `quant/mxfp.py` and `quant/hifp.py` of that fork.

Its MX code is microxcaling's. It uses the floor scale, rounds elements to nearest with ties away from zero, and does
not restore Inf and NaN. mxfp8 is e5m2 by default. Its hifp8 code limits magnitudes to 2^-22 … 0.95 * 2^15 and then
rounds ties away. A nonzero value never becomes zero, and overflow and Inf become ±32768.

Both compute in the tensor's own dtype, and its rounding shows in the results: log2 in bf16 maps 255/256 of a large
power of two to that power. This module therefore runs the same operations in the same dtype and order. The exception
is MX of fp16, which runs in float32: in fp16 most of its scales are 0 or Inf.
"""

from __future__ import annotations

import torch

from capd_client.formats.elements import Element, codes_of
from capd_client.formats.hif8 import hif8_codes
from capd_client.formats.scaled import element_of
from capd_client.formats.spec import Spec

__all__ = ["legacy_hif8_codes", "legacy_hif8_values", "legacy_mx_codes", "legacy_mx_values"]

# Replaces the largest magnitude of a block of zeros.
_SMALLEST_NORMAL = 2.0**-126
_SCALE_LIMIT = 127


def legacy_mx_values(rows: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Quantise and dequantise rows [blocks, values of a block], in their dtype."""
    elements, exponents = _quantised(rows, element_of(spec))
    return (elements * 2**exponents).to(rows.dtype)


def legacy_mx_codes(rows: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, uint8 in the shape of rows, and the E8M0 bytes, uint8 [blocks, 1]."""
    element = element_of(spec)
    elements, exponents = _quantised(rows, element)
    stored = torch.where(exponents.isnan(), 255.0, exponents.to(torch.float32) + 127)
    return codes_of(elements.to(torch.float32), element), stored.to(torch.uint8)


def _quantised(rows: torch.Tensor, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements without their scale, and the exponents of the scales [blocks, 1]."""
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
    """Quantise and dequantise x, in its dtype."""
    magnitude = x.abs().clamp(min=2**-22, max=0.95 * 2**15)
    guard = 2**-14 if x.dtype == torch.float16 else 2**-45
    exponents = (magnitude + guard).log2().floor()
    size = exponents.abs()
    bits = (size <= 15).to(x.dtype) + (size <= 7).to(x.dtype) + (size <= 3).to(x.dtype)
    return (magnitude * 2.0 ** (bits - exponents) + 0.5).floor() * 2.0 ** (exponents - bits) * x.sign()


def legacy_hif8_codes(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return the codes of `legacy_hif8_values`, uint8."""
    return hif8_codes(legacy_hif8_values(x, spec).to(torch.float32))
