"""The use of HiFloat8 by values: its exponent regimes, its codes, and its error by magnitude beside other formats.

A regime is what the format calls D, the width of a value's exponent field; it decides how many bits are left for the
mantissa (arXiv 2409.16626; `capd_client.formats.hif8`). All follows from a histogram of bit patterns: each pattern that
occurs is quantised once, by `capd.formats`, so counts are exact where the histogram is, and groups merge as it does.
Overflow is Inf, as `capd.formats` has it by default; what overflows has no error, and is in no sum.
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
"""By D the exponents of its values. DML holds powers of two alone."""

FINITE_CODES = 253
"""Codes with a finite value of their own: of the 256, one is NaN and two are Inf; zero has one."""

BESIDE: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "hifp8": ("hifp8", {}),
        "fp8:e4m3:unit": ("fp8", {"elem": "e4m3", "scale_mode": "unit"}),
        "fp8:e5m2:unit": ("fp8", {"elem": "e5m2", "scale_mode": "unit"}),
        "bf16": ("bf16", {}),
        "fp16": ("fp16", {}),
    }
)
"""The formats without a scale that HiFloat8 is set beside: what each is called, and what `capd.formats` calls it."""

_ZERO, _UNDERFLOW, _OVERFLOW = "zero", "underflow", "overflow"
_CODES, _INFINITY_CODE, _SIGN_CODE = 256, 0x6F, 0x80
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Regime:
    """The values that become one of its codes.

    name: D ("DML", "0" … "4"); or "zero", what is 0 before and after, "underflow", what becomes 0, "overflow", what
    becomes Inf. mantissa_bits: None for the last three. count: how many; share: of all finite ones. codes, codes_used:
    its codes of both signs, and those that occur.
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

    finite: how many are finite, which is what all else is of. regimes: zero, underflow, DML, 0 … 4, overflow; their
    counts add up to `finite`. codes: how often each of the 256 occurs, by the code. errors: of all that does not
    overflow. exact: whether no element was rounded before it was counted (`capd.analyze.distribution`).
    """

    finite: int
    regimes: Sequence[Regime]
    codes: Counts
    errors: Errors
    exact: bool

    @property
    def codes_used(self) -> int:
        """The number of the FINITE_CODES that occur."""
        return int(np.count_nonzero(self.codes[_finite_codes()]))

    @property
    def entropy_bits(self) -> float | None:
        """-Σ p log2 p over the codes, of at most log2(253) = 7.98: how many bits the 8 are worth here."""
        used = self.codes[self.codes > 0] / max(1, self.finite)
        return max(0.0, float(-(used * np.log2(used)).sum())) if self.finite else None


def hif8_use(distribution: Distribution) -> Hif8Use:
    """Counts how the finite elements use the format. Imports torch."""
    values, counts = distribution.finite()
    codes, found = _encoded(values)
    of_code = np.bincount(codes, counts, _CODES).astype(np.int64)
    total = int(counts.sum())
    names = _names(codes, values)
    usable = np.isfinite(found)
    regimes = []
    for name in (_ZERO, _UNDERFLOW, *REGIMES, _OVERFLOW):
        here = names == name
        own = _codes_of(name)
        number = int(counts[here].sum())
        regimes.append(
            Regime(
                name,
                _mantissa_bits(name),
                number,
                number / total if total else 0.0,
                own.size,
                int(np.count_nonzero(of_code[own])),
                _errors(values, found, counts, here & usable),
            )
        )
    return Hif8Use(total, regimes, of_code, _errors(values, found, counts, usable), distribution.exact)


@dataclass(frozen=True, slots=True)
class ExponentErrors:
    """By binade. exponents: each E at which there are values 2^E ≤ |x| < 2^(E+1), ascending; counts: how many;
    errors: of each format of BESIDE at each of them. Zeros are in none."""

    exponents: Sequence[int]
    counts: Sequence[int]
    errors: Mapping[str, Sequence[Errors]]


def exponent_errors(distribution: Distribution) -> ExponentErrors:
    """The errors of the formats of BESIDE by the magnitude of the value. Imports torch."""
    values, counts = distribution.finite()
    values, counts = values[values != 0], counts[values != 0]
    binades = np.frexp(values)[1] - 1
    exponents = np.unique(binades)
    errors: dict[str, list[Errors]] = {}
    for label, (fmt, options) in BESIDE.items():
        found = _quantised(values, fmt, options)
        usable = np.isfinite(found)
        errors[label] = [_errors(values, found, counts, (binades == one) & usable) for one in exponents]
    return ExponentErrors(
        [int(one) for one in exponents], [int(counts[binades == one].sum()) for one in exponents], errors
    )


def _encoded(values: Values) -> tuple[NDArray[np.uint8], Values]:
    """The code of each value, and the value of that code."""
    import torch

    from capd.formats import decode, encode

    encoded = encode(torch.from_numpy(values.astype(np.float32)), "hifp8")
    return encoded.payload.numpy(), decode(encoded).numpy().astype(np.float64)


def _quantised(values: Values, fmt: str, options: Mapping[str, Any]) -> Values:
    import torch

    from capd.formats import qdq

    overflow: dict[str, Any] = {"overflow": "inf"}  # no format gains by what it would have cut off
    single = torch.from_numpy(values.astype(np.float32))  # exact: patterns of bfloat16 and float16
    return qdq(single, fmt, **{**options, **overflow}).numpy().astype(np.float64)


def _errors(values: Values, found: Values, counts: Counts, where: NDArray[np.bool_]) -> Errors:
    errors = Errors(count=int(counts[where].sum()))
    errors.add_values(values[where], found[where], counts[where])
    return errors


def _names(codes: NDArray[np.uint8], values: Values) -> NDArray[np.str_]:
    """The regime of each value by its code."""
    names = np.full(_CODES, _OVERFLOW, dtype="U9")
    for name in REGIMES:
        names[_codes_of(name)] = name
    names[0] = _UNDERFLOW
    found = names[codes]
    found[values == 0] = _ZERO
    return found


def _codes_of(name: str) -> NDArray[np.intp]:
    """The codes of a regime, of both signs."""
    from capd_client.formats.hif8 import first_code, mantissa_bits

    if name == _OVERFLOW:
        return np.array([_INFINITY_CODE, _INFINITY_CODE | _SIGN_CODE])
    if name not in REGIMES:
        return np.array([0])
    positive = [
        first_code(exponent) + step
        for exponent in REGIMES[name]
        for step in range(1 << mantissa_bits(exponent))
    ]
    usable = np.array([code for code in positive if code != _INFINITY_CODE])
    return np.concatenate([usable, usable | _SIGN_CODE])


def _mantissa_bits(name: str) -> int | None:
    from capd_client.formats.hif8 import mantissa_bits

    return mantissa_bits(REGIMES[name][0]) if name in REGIMES else None


def _finite_codes() -> NDArray[np.intp]:
    return np.concatenate([np.array([0]), *map(_codes_of, REGIMES)])
