"""The small floating-point elements of FP8, MX and NVFP4: their values, rounding onto them, and their codes.

All arithmetic is on float32 bit patterns or sums that are exact by construction; torch's own casts to 8-bit
floats, whose specials differ between versions, are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from capd_client.formats.tables import kept

__all__ = ["ELEMENTS", "FP16", "Element", "codes_of", "decode_table", "quantise"]

_EXPONENT_BITS = 0x7F800000
_MANTISSA_WIDTH = 23
_HALF_MANTISSA = 0x400000
_BIAS = 127
_UPPER_HALF, _UPPER_MAGNITUDE, _UPPER_INFINITY = 0xFFFF, 0x7FFF, 0x7F80


@dataclass(frozen=True)
class Element:
    """Sign, `exponent_bits`, `mantissa_bits`; subnormals as in IEEE 754. `max_value` is the largest finite one.

    `infinity` and `nan` are the positive codes of Inf and of the NaN that is written; None where there is none.
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
        """The exponent of the smallest normal value, and of the subnormals' step times 2**mantissa_bits."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest power of two, `emax` in the MX specification."""
        return int(self.max_value).bit_length() - 1

    def value(self, code: int) -> float:
        """What a code stands for."""
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


@kept
def decode_table(element: Element, device: torch.device) -> torch.Tensor:
    """The values of all codes, float32 [2 * sign_code]."""
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
    """Round float32 values onto the element's grid, in place; returns `scaled`.

    signs: what the sign of a zero is taken from, of the same shape. NaN stays NaN. What lies beyond `max_value` becomes
    ±max_value if `saturate`, else Inf, or NaN where the element has no Inf.
    """
    limit = element.max_value if saturate else 2.0 ** (element.max_exponent + 1)
    scaled.clamp_(-limit, limit)
    if rounding == "stochastic":
        _round_stochastically(scaled, element, generator)
    else:
        if rounding == "away":
            # A tie, whose low bits are zero, becomes more than one; nothing else crosses a tie.
            scaled.view(torch.int32).bitwise_or_(1)
        _round_to_even(scaled, element)
    scaled.copysign_(signs)
    if not saturate:
        beyond = scaled.abs() > element.max_value
        outside = torch.nan if element.infinity is None else torch.inf
        scaled.copy_(torch.where(beyond, torch.full_like(scaled, outside).copysign_(scaled), scaled))
    return scaled


def _exponents(values: torch.Tensor, element: Element) -> torch.Tensor:
    """The exponent field of each value's binade, no less than the smallest normal's, as float32 bits."""
    exponents = torch.bitwise_and(values.view(torch.int32), _EXPONENT_BITS)
    return exponents.clamp_(min=(element.min_exponent + _BIAS) << _MANTISSA_WIDTH)


def _round_to_even(values: torch.Tensor, element: Element) -> None:
    # Adding 1.5 * 2**23 steps leaves room for no fraction of a step: the sum is rounded to a whole one, ties to even.
    magic = _exponents(values, element)
    magic.add_(((_MANTISSA_WIDTH - element.mantissa_bits) << _MANTISSA_WIDTH) + _HALF_MANTISSA)
    offset = magic.view(torch.float32)
    values.add_(offset).sub_(offset)


def _round_stochastically(
    values: torch.Tensor, element: Element, generator: Optional[torch.Generator]
) -> None:
    step = _exponents(values, element).sub_(element.mantissa_bits << _MANTISSA_WIDTH).view(torch.float32)
    steps = values.abs().div_(step)  # exact: a power of two
    lower = steps.floor()
    noise = torch.rand(values.shape, generator=generator, dtype=torch.float32, device=values.device)
    values.copy_(lower.add_(noise < steps.sub_(lower)).mul_(step))


def codes_of(values: torch.Tensor, element: Element) -> torch.Tensor:
    """The codes of float32 values that lie on the element's grid, uint8. NaN without a code of its own becomes 0."""
    patterns = (values.view(torch.int32) >> 16).bitwise_and_(_UPPER_HALF)
    return _code_table(element, values.device).index_select(0, patterns.view(-1)).view(values.shape)


@kept
def _code_table(element: Element, device: torch.device) -> torch.Tensor:
    """Codes by the upper half of a value's float32 pattern, where all of its mantissa lies, uint8 [65536]."""
    values = [element.value(code) for code in range(2 * element.sign_code)]
    held = [code for code, value in enumerate(values) if value == value]
    numbers = torch.tensor([values[code] for code in held], dtype=torch.float32, device=device)
    patterns = (numbers.view(torch.int32) >> 16) & _UPPER_HALF
    codes = torch.zeros(_UPPER_HALF + 1, dtype=torch.uint8, device=device)
    codes[patterns.to(torch.int64)] = torch.tensor(held, dtype=torch.uint8, device=device)
    every = torch.arange(_UPPER_HALF + 1, device=device)
    codes[(every & _UPPER_MAGNITUDE) > _UPPER_INFINITY] = element.nan or 0
    return codes
