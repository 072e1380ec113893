"""The use of HiFloat8 by values: exponent regimes, codes, and the error by magnitude compared to other formats.

A regime is the format's D, the width of a value's exponent field. It decides how many bits remain for the mantissa
(arXiv 2409.16626; `capd_client.formats.hif8`). All numbers follow from a histogram of bit patterns. Each occurring
pattern is quantised once, by `capd.formats`. So counts are exact if the histogram is, and groups merge like it.

Overflow is Inf, the default of `capd.formats`. A value that overflows has no error and is in no sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.analyze.distribution import Distribution
from capd.analyze.error_sums import Errors

__all__ = [
    "BESIDE", "FINITE_CODES", "REGIMES", "ExponentErrors", "Hif8Use", "Regime", "exponent_errors",
    "hif8_use",
]  # fmt: skip

REGIMES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "DML": tuple(range(-22, -15)),
        "0": (0,),
        "1": (-1, 1),
        "2": (-3, -2, 2, 3),
        "3": (-7, -6, -5, -4, 4, 5, 6, 7),
        "4": (*range(-15, -7), *range(8, 16)),
    }
)
"""The exponents of the values of each D. DML holds only powers of two."""

FINITE_CODES = 253
"""The codes with a finite value of their own. One of the 256 codes is NaN and two are Inf; zero has one."""

BESIDE: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "hifp8": ("hifp8", {}),
        "fp8:e4m3:unit": ("fp8", {"elem": "e4m3", "scale_mode": "unit"}),
        "fp8:e5m2:unit": ("fp8", {"elem": "e5m2", "scale_mode": "unit"}),
        "bf16": ("bf16", {}),
        "fp16": ("fp16", {}),
    }
)
"""The formats without a scale that are compared with HiFloat8: label → name and options in `capd.formats`."""

_ZERO, _UNDERFLOW, _OVERFLOW, _NAN = "zero", "underflow", "overflow", "NaN"
_CODES = 256
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Regime:
    """The values that become one of the regime's codes.

    Attributes:
        name: D ("DML", "0" … "4"). Or "zero" (0 before and after), "underflow" (becomes 0), "overflow" (becomes Inf).
        mantissa_bits: The bits of the mantissa, None for the last three names.
        count: The number of values.
        share: The share of all finite values.
        codes: The number of the regime's codes of both signs.
        codes_used: The number of these codes that occur.
    """

    name: str
    mantissa_bits: int | None
    count: int
    share: float
    codes: int
    codes_used: int
    errors: Errors


@dataclass(frozen=True, slots=True)
class Hif8Use:
    """The use of HiFloat8 by some elements.

    Attributes:
        finite: The number of finite elements. All other numbers refer to them.
        regimes: zero, underflow, DML, 0 … 4, overflow. Their counts add up to `finite`.
        codes: The count of each of the 256 codes.
        errors: The errors of all elements that do not overflow.
        exact: Whether no element was rounded before it was counted (`capd.analyze.distribution`).
    """

    finite: int
    regimes: Sequence[Regime]
    codes: Counts
    errors: Errors
    exact: bool

    @property
    def codes_used(self) -> int:
        """The number of the FINITE_CODES that occur."""
        return int(np.count_nonzero(self.codes[~np.isin(_regime_of_codes(), (_OVERFLOW, _NAN))]))

    @property
    def entropy_bits(self) -> float | None:
        """-Σ p log2 p over the codes, at most log2(253) = 7.98: the information in the 8 bits."""
        used = self.codes[self.codes > 0] / max(1, self.finite)
        return max(0.0, float(-(used * np.log2(used)).sum())) if self.finite else None


def hif8_use(distribution: Distribution) -> Hif8Use:
    """Count how the finite elements use the format. Imports torch."""
    from capd_client.formats.hif8 import mantissa_bits

    values, counts = distribution.finite()
    codes, found = _encoded(values)
    of_code = np.bincount(codes, counts, _CODES).astype(np.int64)
    total = int(counts.sum())
    of_codes, usable = _regime_of_codes(), np.isfinite(found)
    names = np.where(values == 0, _ZERO, of_codes[codes])
    regimes = []
    for name in (_ZERO, _UNDERFLOW, *REGIMES, _OVERFLOW):
        here = names == name
        # Zeros and underflows become the same code.
        own = of_code[of_codes == (_UNDERFLOW if name == _ZERO else name)]
        number = int(counts[here].sum())
        regimes.append(
            Regime(
                name,
                mantissa_bits(REGIMES[name][0]) if name in REGIMES else None,
                number,
                number / total if total else 0.0,
                own.size,
                int(np.count_nonzero(own)),
                _errors(values, found, counts, here & usable),
            )
        )
    return Hif8Use(total, regimes, of_code, _errors(values, found, counts, usable), distribution.exact)


@dataclass(frozen=True, slots=True)
class ExponentErrors:
    """The errors by binade. Zeros are in none.

    Attributes:
        exponents: Each E that has values 2^E ≤ |x| < 2^(E+1), ascending.
        counts: The number of these values.
        errors: The errors of each format of BESIDE at each exponent.
    """

    exponents: Sequence[int]
    counts: Sequence[int]
    errors: Mapping[str, Sequence[Errors]]


def exponent_errors(distribution: Distribution) -> ExponentErrors:
    """Return the errors of the formats of BESIDE by the magnitude of the value. Imports torch."""
    values, counts = distribution.finite()
    values, counts = values[values != 0], counts[values != 0]
    binades = np.frexp(values)[1] - 1
    exponents = np.unique(binades)
    errors: dict[str, list[Errors]] = {}
    for label, (fmt, options) in BESIDE.items():
        found = _quantised(values, fmt, options)
        usable = np.isfinite(found)
        errors[label] = [_errors(values, found, counts, (binades == one) & usable) for one in exponents]
    numbers = [int(counts[binades == one].sum()) for one in exponents]
    return ExponentErrors(exponents.tolist(), numbers, errors)


def _encoded(values: Values) -> tuple[NDArray[np.uint8], Values]:
    """Return the code of each value, and the value of that code."""
    import torch

    from capd.formats import decode, encode

    encoded = encode(torch.from_numpy(values.astype(np.float32)), "hifp8")
    return encoded.payload.numpy(), decode(encoded).numpy().astype(np.float64)


def _quantised(values: Values, fmt: str, options: Mapping[str, Any]) -> Values:
    import torch

    from capd.formats import qdq

    # The conversion is exact, because the values are patterns of bfloat16 and float16.
    single = torch.from_numpy(values.astype(np.float32))
    # No format may gain from clipping.
    return qdq(single, fmt, **{**options, "overflow": "inf"}).numpy().astype(np.float64)


def _errors(values: Values, found: Values, counts: Counts, where: NDArray[np.bool_]) -> Errors:
    errors = Errors(count=int(counts[where].sum()))
    errors.add_values(values[where], found[where], counts[where])
    return errors


def _regime_of_codes() -> NDArray[np.str_]:
    """Return the name of each code's regime. Code 0, of which only one sign exists, belongs to "underflow"."""
    from capd_client.formats.hif8 import INFINITY_CODE, NAN_CODE, first_code, mantissa_bits

    positive = np.full(_CODES // 2, _UNDERFLOW, dtype="U9")
    for name, exponents in REGIMES.items():
        for exponent in exponents:
            first = first_code(exponent)
            positive[first : first + (1 << mantissa_bits(exponent))] = name
    positive[INFINITY_CODE] = _OVERFLOW
    names = np.tile(positive, 2)
    names[NAN_CODE] = _NAN
    return names
