"""E8M0, the scale of the MX formats: a power of two in one byte, and the four ways to choose it for a block.

Source: OCP Microscaling Formats (MX) Specification v1.0, §5.4.1 (E8M0) and §6.3 (conversion of a block). Byte b is
2**(b - 127), from 2**-127 to 2**127. Byte 255 is NaN. There is no zero, no sign and no Inf.
"""

from __future__ import annotations

import torch

from capd_client.formats.elements import Element
from capd_client.formats.tables import cached

__all__ = ["e8m0_bytes", "e8m0_reciprocals", "e8m0_values"]

_NAN_BYTE = 255
_LARGEST_BYTE = 254
_INFINITY_BITS = 0x7F800000
_MANTISSA_MASK = 0x7FFFFF
_HALF_OF_SUBNORMALS = 0x400000


def e8m0_bytes(amax: torch.Tensor, element: Element, mode: str) -> torch.Tensor:
    """Return the byte of each block's scale, int32 of `amax`'s shape.

    emax is the exponent of the element's largest power of two, max its largest value:

    - floor: 2**(floor(log2 amax) - emax), as in §6.3.
    - ceil: 2**(ceil(log2 amax) - emax).
    - even: 2**(floor(log2 r) - emax), where r is amax rounded to the element's mantissa, ties up.
    - rceil: 2**ceil(log2(amax / max)) with the quotient in float32, as NVIDIA's hardware converts
      (cvt.rp.satfinite.ue8m0x2.f32).

    Bytes are limited to 0 … 254. A block of zeros has byte 0. A block with an Inf or a NaN has byte 255.

    Args:
        amax: The largest magnitudes of the blocks, float32.
        element: The element of the format.
        mode: "floor", "ceil", "even" or "rceil".
    """
    bits = amax.view(torch.int32)
    if mode == "rceil":
        # The divisor is a tensor, because CUDA divides by a number as a product with its rounded reciprocal.
        quotients = amax / torch.full_like(amax, element.max_value)
        exponents = _ceil_exponents(quotients.view(torch.int32))
    else:
        if mode == "even":
            exponents = (bits + (1 << (22 - element.mantissa_bits))) >> 23
        elif mode == "ceil":
            exponents = (bits + _MANTISSA_MASK) >> 23
        else:
            exponents = bits >> 23
        exponents = exponents - element.max_exponent
    return torch.where(bits >= _INFINITY_BITS, _NAN_BYTE, exponents.clamp(0, _LARGEST_BYTE))


def _ceil_exponents(bits: torch.Tensor) -> torch.Tensor:
    # Byte 0 covers everything up to 2**-127, which is the lower half of the subnormals.
    return torch.where(bits <= _HALF_OF_SUBNORMALS, 0, (bits + _MANTISSA_MASK) >> 23)


@cached
def _table(device: torch.device) -> torch.Tensor:
    values = [2.0 ** (byte - 127) for byte in range(_NAN_BYTE)]
    return torch.tensor([*values, float("nan")], dtype=torch.float32, device=device)


def e8m0_values(found: torch.Tensor) -> torch.Tensor:
    """Return the scales of the bytes, float32; 2**-127 is a subnormal, exactly."""
    return _looked_up(found)


def e8m0_reciprocals(found: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale of the bytes, float32, exactly; NaN for 255."""
    return _looked_up(torch.where(found == _NAN_BYTE, _NAN_BYTE, _LARGEST_BYTE - found))


def _looked_up(found: torch.Tensor) -> torch.Tensor:
    return _table(found.device).index_select(0, found.reshape(-1).to(torch.int32)).view(found.shape)
