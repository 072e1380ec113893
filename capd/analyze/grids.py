"""The grids of values that number formats have without a scale, and the elements outside of a grid's range.

Elements are counted from a histogram of bit patterns. The counts are exact if the histogram is, and they merge like it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.distribution import Distribution

if TYPE_CHECKING:
    from collections.abc import Mapping

    from capd_client.formats.elements import Element

__all__ = [
    "HIGH_PERCENT",
    "MODERATE_PERCENT",
    "Grid",
    "Overflow",
    "grid_of",
    "grids",
    "overflow_of",
    "severity",
]

MODERATE_PERCENT, HIGH_PERCENT = 0.1, 1.0
"""The shares above which `severity` calls an overflow or an underflow moderate and high."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of an unscaled format, or of the elements of a scaled one under a scale of 1.

    Attributes:
        label: "hifp8", "bf16", or an element's name.
        largest: The largest finite value.
        normal: The smallest normal value.
        smallest: The smallest value above 0.
        mantissa_bits: For every exponent E that has values 2^E ≤ |x| < 2^(E+1), the number of bits after the leading
            one. The step of these values is 2^(E - bits).
    """

    label: str
    largest: float
    normal: float
    smallest: float
    mantissa_bits: Mapping[int, int]


# Under a scale of 1: 0.25 … 1.75 without exponents of 4 and 8 values, up to 7 with both.
_HIF4 = Grid("hif4", 7.0, 0.25, 0.25, MappingProxyType({-2: 0, -1: 1, 0: 2, 1: 2, 2: 2}))


@cache
def grids() -> Mapping[str, Grid]:
    """Return all grids by their labels: hifp8, e4m3, e5m2, e3m2, e2m3, e2m1, bf16, fp16. Imports torch.

    Source: the definitions in `capd_client.formats`, which docs/formats.md has in a table.
    """
    from capd_client.formats.elements import ELEMENTS, FP16, Element

    bf16 = Element("bf16", 8, 7, 127, float(0xFF << 120))
    found = [_hif8(), *map(_of_element, (*ELEMENTS.values(), bf16, FP16))]
    return MappingProxyType({grid.label: grid for grid in found})


def grid_of(fmt: str, elem: str | None = None) -> Grid:
    """Return the grid of a format of `capd.formats`, or of its elements if it has any: `elem`, or else its default."""
    from capd_client.formats.spec import FORMATS

    return _HIF4 if fmt == "hif4" else grids()[elem or next(iter(FORMATS[fmt].elems), fmt)]


def _of_element(element: Element) -> Grid:
    low = element.min_exponent
    bits = {low - below: element.mantissa_bits - below for below in range(element.mantissa_bits, 0, -1)}
    bits |= dict.fromkeys(range(low, element.max_exponent + 1), element.mantissa_bits)
    smallest = 2.0 ** (low - element.mantissa_bits)
    return Grid(element.name, element.max_value, 2.0**low, smallest, MappingProxyType(bits))


def _hif8() -> Grid:
    from capd_client.formats.hif8 import MAX_EXPONENT, MIN_EXPONENT, mantissa_bits

    bits = {exponent: mantissa_bits(exponent) for exponent in range(MIN_EXPONENT, MAX_EXPONENT + 1)}
    normal = min(exponent for exponent, number in bits.items() if number)
    return Grid("hifp8", 2.0**MAX_EXPONENT, 2.0**normal, 2.0**MIN_EXPONENT, MappingProxyType(bits))


@dataclass(frozen=True, slots=True)
class Overflow:
    """Counts over some elements. All counts except `nan` and `inf` are of finite elements.

    Attributes:
        label: The grid's label.
        count: All elements.
        above: |x| > largest.
        below: 0 < |x| < smallest, even if rounding would take x to the smallest value.
        flushed: 0 < |x| < normal, `below` included.
    """

    label: str
    count: int
    nan: int
    inf: int
    zero: int
    above: int
    below: int
    flushed: int

    @property
    def above_percent(self) -> float | None:
        """100 * above / count, None without elements."""
        return self._percent(self.above)

    @property
    def below_percent(self) -> float | None:
        """100 * below / count: |x| below the smallest denormal."""
        return self._percent(self.below)

    @property
    def flushed_percent(self) -> float | None:
        """100 * flushed / count: |x| below the smallest normal value."""
        return self._percent(self.flushed)

    def _percent(self, number: int) -> float | None:
        return 100 * number / self.count if self.count else None


def severity(percent: float | None) -> str:
    """Return the word for a share: "none", "low", "moderate" above 0.1 %, "high" above 1 %."""
    if not percent:
        return "none"
    return "high" if percent > HIGH_PERCENT else "moderate" if percent > MODERATE_PERCENT else "low"


def overflow_of(distribution: Distribution, grid: Grid, *, scaled: bool = False) -> Overflow:
    """Count the elements outside of the grid.

    `scaled` scales all elements so that their largest magnitude becomes the grid's largest value, as per-tensor scaling
    does. No element is above then.
    """
    values, counts = distribution.finite()
    nan, inf = distribution.specials()
    sizes = np.abs(values)
    amax = float(sizes.max(initial=0.0))
    scale = amax / grid.largest if scaled and amax else 1.0
    zero = int(counts[sizes == 0].sum())

    def under(limit: float) -> int:
        return int(counts[sizes < limit * scale].sum()) - zero

    return Overflow(
        label=grid.label,
        count=int(counts.sum()) + nan + inf,
        nan=nan,
        inf=inf,
        zero=zero,
        above=0 if scaled else int(counts[sizes > grid.largest].sum()),
        below=under(grid.smallest),
        flushed=under(grid.normal),
    )
