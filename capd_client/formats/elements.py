"""The small floating-point elements of FP8, MX and NVFP4: their values, rounding to them, and their codes.

All arithmetic is on float32 bit patterns, or on sums that are exact by construction. This module does not use torch's
casts to 8-bit floats, because their special values differ between versions of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from capd_client.formats.tables import cached

__all__ = ["ELEMENTS", "FP16", "Element", "codes_of", "decode_table", "quantise"]

_EXPONENT_BITS = 0x7F800000
_MANTISSA_WIDTH = 23
_HALF_MANTISSA = 0x400000
_BIAS = 127
_UPPER_HALF, _UPPER_MAGNITUDE, _UPPER_INFINITY = 0xFFFF, 0x7FFF, 0x7F80


@dataclass(frozen=True)
class Element:
    """A floating-point element: a sign, `exponent_bits` and `mantissa_bits`, with subnormals as in IEEE 754.

    `max_value` is the largest finite value. `infinity` and `nan` are the positive codes of Inf and of the NaN that
    capd writes; None means that the element has no such code.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    infinity: Optional[int] = None
    nan: Optional[int] = None

    @property
    def sign_code(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value; the subnormals' step is 2**(min_exponent - mantissa_bits)."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest power of two, `emax` in the MX specification."""
        return int(self.max_value).bit_length() - 1

    def value(self, code: int) -> float:
        """Return the value that a code represents."""
        magnitude = code & (self.sign_code - 1)
        sign = -1.0 if code & self.sign_code else 1.0
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        step = 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)
        found = (mantissa + (exponent > 0) * (1 << self.mantissa_bits)) * step
        if found > self.max_value:
            found = float("inf") if magnitude == self.infinity else float("nan")
        return sign * found


ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", 4, 3, 7, 448.0, nan=0x7F),
        Element("e5m2", 5, 2, 15, 57344.0, infinity=0x7C, nan=0x7E),
        Element("e3m2", 3, 2, 3, 28.0),
        Element("e2m3", 2, 3, 1, 7.5),
        Element("e2m1", 2, 1, 1, 6.0),
    )
}
FP16 = Element("fp16", 5, 10, 15, 65504.0, infinity=0x7C00, nan=0x7E00)


@cached
def decode_table(element: Element, device: torch.device) -> torch.Tensor:
    """Return the values of all codes, float32 [2 * sign_code]."""
    values = [element.value(code) for code in range(2 * element.sign_code)]
    return torch.tensor(values, dtype=torch.float32, device=device)


def quantise(
    scaled: torch.Tensor,
    signs: torch.Tensor,
    element: Element,
    rounding: str,
    *,
    saturate: bool = True,
    generator: Optional[torch.Generator] = None,
) -> torch.Tensor:
    """Round float32 values to the element's grid, in place.

    NaN stays NaN.

    Args:
        scaled: The values, float32 of any shape, divided by their scale.
        signs: A tensor of the same shape; zeros take their sign from it.
        element: The element to round to.
        rounding: "even", "away" or "stochastic".
        saturate: Whether magnitudes above `max_value` become ±max_value. Otherwise they become Inf, or NaN if the
            element has no Inf.
        generator: Source of the random bits of "stochastic"; None is torch's default generator of the device.

    Returns:
        `scaled`.
    """
    limit = element.max_value if saturate else 2.0 ** (element.max_exponent + 1)
    scaled.clamp_(-limit, limit)
    if rounding == "stochastic":
        _round_stochastically(scaled, element, generator)
    else:
        if rounding == "away":
            # The low bits of a tie are zero. Setting one makes the tie round up, and no other value crosses a tie.
            scaled.view(torch.int32).bitwise_or_(1)
        _round_to_even(scaled, element)
    scaled.copysign_(signs)
    if not saturate:
        beyond = scaled.abs() > element.max_value
        outside = torch.nan if element.infinity is None else torch.inf
        scaled.copy_(torch.where(beyond, torch.full_like(scaled, outside).copysign_(scaled), scaled))
    return scaled


def _exponents(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the exponent field of each value's binade, at least the smallest normal's, as float32 bits."""
    exponents = torch.bitwise_and(values.view(torch.int32), _EXPONENT_BITS)
    return exponents.clamp_(min=(element.min_exponent + _BIAS) << _MANTISSA_WIDTH)


def _round_to_even(values: torch.Tensor, element: Element) -> None:
    # A float32 of 1.5 * 2**23 steps has no bits for a fraction of a step: adding it rounds to steps, ties to even.
    magic = _exponents(values, element)
    magic.add_(((_MANTISSA_WIDTH - element.mantissa_bits) << _MANTISSA_WIDTH) + _HALF_MANTISSA)
    offset = magic.view(torch.float32)
    values.add_(offset).sub_(offset)


def _round_stochastically(
    values: torch.Tensor, element: Element, generator: Optional[torch.Generator]
) -> None:
    step = _exponents(values, element).sub_(element.mantissa_bits << _MANTISSA_WIDTH).view(torch.float32)
    # The quotient is exact, because a step is a power of two.
    steps = values.abs().div_(step)
    lower = steps.floor()
    noise = torch.rand(values.shape, generator=generator, dtype=torch.float32, device=values.device)
    # In place the comparison gives float32, which is several times as fast to add as bool.
    lower.add_(noise.lt_(steps.sub_(lower)))
    torch.mul(lower, step, out=values)


def codes_of(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the codes of float32 values that are on the element's grid, uint8.

    NaN becomes 0 if the element has no code for NaN.
    """
    patterns = (values.view(torch.int32) >> 16).bitwise_and_(_UPPER_HALF)
    return _code_table(element, values.device).index_select(0, patterns.reshape(-1)).view(values.shape)


@cached
def _code_table(element: Element, device: torch.device) -> torch.Tensor:
    """Return the codes by the upper half of a value's float32 pattern, uint8 [65536].

    The lower half is zero, because an element's mantissa fits into the upper one.
    """
    values = [element.value(code) for code in range(2 * element.sign_code)]
    held = [code for code, value in enumerate(values) if value == value]
    numbers = torch.tensor([values[code] for code in held], dtype=torch.float32, device=device)
    patterns = (numbers.view(torch.int32) >> 16) & _UPPER_HALF
    codes = torch.zeros(_UPPER_HALF + 1, dtype=torch.uint8, device=device)
    codes[patterns.to(torch.int64)] = torch.tensor(held, dtype=torch.uint8, device=device)
    every = torch.arange(_UPPER_HALF + 1, device=device)
    codes[(every & _UPPER_MAGNITUDE) > _UPPER_INFINITY] = element.nan or 0
    return codes
