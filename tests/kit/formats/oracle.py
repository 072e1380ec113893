"""What the formats are compared with where no package does it: codebooks of exact fractions, searched one by one.

Nothing here shares code with `capd_client.formats`: values follow from the published layouts, and rounding is a
comparison of distances.
"""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import numpy as np
import torch

# exponent bits, mantissa bits, bias, largest finite value
LAYOUTS = {
    "e4m3": (4, 3, 7, Fraction(448)),
    "e5m2": (5, 2, 15, Fraction(57344)),
    "e3m2": (3, 2, 3, Fraction(28)),
    "e2m3": (2, 3, 1, Fraction(15, 2)),
    "e2m1": (2, 1, 1, Fraction(6)),
    "fp16": (5, 10, 15, Fraction(65504)),
}


class Codebook:
    """The magnitudes of a format in order, the index of each being its code."""

    def __init__(self, magnitudes: list[Fraction]) -> None:
        assert magnitudes == sorted(magnitudes)
        self.magnitudes = magnitudes

    def nearest(self, value: Fraction, ties: str) -> Fraction:
        """The magnitude nearest to `value`, the largest one if it lies beyond; ties "even" (of the code) or "away"."""
        above = bisect.bisect_left(self.magnitudes, value)
        if above == len(self.magnitudes):
            return self.magnitudes[-1]
        if self.magnitudes[above] == value:
            return value
        low, high = self.magnitudes[above - 1], self.magnitudes[above]
        if value - low != high - value:
            return low if value - low < high - value else high
        return high if ties == "away" or above % 2 == 0 else low

    def neighbours(self, value: Fraction) -> tuple[Fraction, Fraction]:
        above = min(bisect.bisect_left(self.magnitudes, value), len(self.magnitudes) - 1)
        exact = self.magnitudes[above] == value
        return (value, value) if exact else (self.magnitudes[above - 1], self.magnitudes[above])


def float_codebook(elem: str) -> Codebook:
    exponent_bits, mantissa_bits, bias, largest = LAYOUTS[elem]
    found = []
    for exponent in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            hidden = 1 if exponent else 0
            fraction = hidden + Fraction(mantissa, 1 << mantissa_bits)
            found.append(fraction * Fraction(2) ** (max(exponent, 1) - bias))
    return Codebook([value for value in found if value <= largest])


def hif8_magnitudes() -> dict[int, Fraction]:
    """Magnitude by code, read off the fields of the byte: dot, exponent, mantissa."""
    found = {0: Fraction(0)}
    for code in range(1, 0x80):
        text = f"{code:07b}"
        if text.startswith("0000"):
            found[code] = Fraction(2) ** (int(text[4:], 2) - 23)
            continue
        dot, width = next(
            pair
            for pair in (("0001", 0), ("001", 1), ("01", 2), ("10", 3), ("11", 4))
            if text.startswith(pair[0])
        )
        exponent_text, mantissa_text = text[len(dot) : len(dot) + width], text[len(dot) + width :]
        exponent = 0
        if width:
            exponent = int("1" + exponent_text[1:], 2) * (-1 if exponent_text[0] == "1" else 1)
        mantissa = Fraction(int(mantissa_text, 2), 1 << len(mantissa_text))
        if code != 0x6F:  # Inf
            found[code] = (1 + mantissa) * Fraction(2) ** exponent
    return found


def hif8_codebook() -> Codebook:
    return Codebook(sorted(hif8_magnitudes().values()))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def around(points: list[float]) -> torch.Tensor:
    """Each point as float32 with its neighbours one unit in the last place away, and the negatives of all."""
    exact = np.array(points, dtype=np.float32)
    assert [float(point) for point in exact] == points
    with np.errstate(over="ignore"):
        near = np.concatenate(
            [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, -np.float32(np.inf))]
        )
    return torch.from_numpy(np.concatenate([near, -near]))


def ties(codebook: Codebook) -> list[float]:
    """All values halfway between two neighbours, all values of the codebook, and what is just beyond its largest."""
    values = codebook.magnitudes
    halves = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    last = values[-1] + (values[-1] - values[-2]) / 2
    return [float(value) for value in [*values, *halves, last]]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, the signs of zeros too; any NaN equals any NaN."""
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == expected.shape
    nans = found.isnan() & expected.isnan()
    return bool((nans | (found.view(torch.int32) == expected.view(torch.int32))).all())


def fraction_of(value: float) -> Fraction:
    assert math.isfinite(value)
    return Fraction(value)
