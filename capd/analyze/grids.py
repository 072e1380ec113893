"""The grids of values that number formats have without a scale: where each ends, and its steps at each exponent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from capd_client.formats.elements import Element

__all__ = ["Grid", "grid_of", "grids"]


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of an unscaled format, or of the elements of a scaled one under a scale of 1.

    label: "hifp8", "bf16", or an element's name. largest: the largest finite value. normal: the smallest normal one.
    smallest: the smallest one above 0. mantissa_bits: for every exponent E at which there are values
    2^E ≤ |x| < 2^(E+1), how many bits follow their leading one: their step is 2^(E - bits).
    """

    label: str
    largest: float
    normal: float
    smallest: float
    mantissa_bits: Mapping[int, int]


@cache
def grids() -> Mapping[str, Grid]:
    """All of them, by their labels: hifp8, e4m3, e5m2, e3m2, e2m3, e2m1, bf16, fp16. Imports torch.

    Source: the definitions in `capd_client.formats`; docs/formats.md has them in a table.
    """
    from capd_client.formats.elements import ELEMENTS, FP16

    found = [_hif8(), *map(_of_element, ELEMENTS.values()), _bf16(), _of_element(FP16)]
    return MappingProxyType({grid.label: grid for grid in found})


def grid_of(fmt: str, elem: str | None = None) -> Grid:
    """The grid of a format of `capd.formats`, of its elements where it has any. elem: None for the format's default.

    Raises KeyError for a format that there is not.
    """
    from capd_client.formats.spec import FORMATS

    return grids()[elem or next(iter(FORMATS[fmt].elems), fmt)]


def _of_element(element: Element) -> Grid:
    low = element.min_exponent
    bits = {low - below: element.mantissa_bits - below for below in range(element.mantissa_bits, 0, -1)}
    bits |= dict.fromkeys(range(low, element.max_exponent + 1), element.mantissa_bits)
    smallest = 2.0 ** (low - element.mantissa_bits)
    return Grid(element.name, element.max_value, 2.0**low, smallest, MappingProxyType(bits))


def _bf16() -> Grid:
    from capd_client.formats.elements import Element

    return _of_element(Element("bf16", 8, 7, 127, float(0xFF << 120)))


def _hif8() -> Grid:
    from capd_client.formats.hif8 import MAX_EXPONENT, MIN_EXPONENT, mantissa_bits

    bits = {exponent: mantissa_bits(exponent) for exponent in range(MIN_EXPONENT, MAX_EXPONENT + 1)}
    normal = min(exponent for exponent, number in bits.items() if number)
    return Grid("hifp8", 2.0**MAX_EXPONENT, 2.0**normal, 2.0**MIN_EXPONENT, MappingProxyType(bits))
