"""The difference of two records of the same shape and dtype: bits first, then values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capd.analyze.error_sums import Errors
from capd.store.format.dtypes import to_values

__all__ = ["Difference", "difference_of"]

# The number of elements that are processed at once.
_BLOCK = 1 << 17
# Squares of larger float64 values might not be finite.
_BEYOND = 2.0**500
_PACKED = "float4_e2m1fn_x2"


@dataclass(slots=True)
class Difference:
    """The difference of any number of pairs of records, a and b. `add` is exact in any order. Not thread-safe.

    Attributes:
        identical: The pairs that agree in every bit.
        equal: The elements that agree in every bit.
        special: The elements that differ and are NaN, Inf, or at least 2^500 in one of the two records.
        max_relative: max(|a - b| / |a|) over a ≠ 0.
        errors: The errors over the other elements, with x = a and y = b. `Errors.records` counts pairs,
            `Errors.count` elements.
    """

    identical: int = 0
    equal: int = 0
    special: int = 0
    max_relative: float = 0.0
    errors: Errors = field(default_factory=Errors)

    def add(self, other: Difference) -> None:
        """Add other pairs."""
        self.identical += other.identical
        self.equal += other.equal
        self.special += other.special
        self.max_relative = max(self.max_relative, other.max_relative)
        self.errors.add(other.errors)

    def exceeds(self, tolerance: float) -> bool:
        """Return whether max|a - b| > tolerance * max|a|, or an element is special. With 0: whether any bit differs."""
        if not tolerance:
            return self.identical != self.errors.records
        return self.special > 0 or self.errors.max_abs > tolerance * self.errors.absmax


def difference_of(a: NDArray[np.generic], b: NDArray[np.generic], dtype: str) -> Difference:
    """Return the difference of the stored elements of two records of one shape and torch dtype."""
    found = Difference(errors=Errors(records=1))
    left, right = a.reshape(-1), b.reshape(-1)
    for start in range(0, left.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        _add(found, left[block], right[block], dtype)
    found.identical = int(found.equal == found.errors.count)
    return found


# The elements may have any bits.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _add(found: Difference, a: NDArray[np.generic], b: NDArray[np.generic], dtype: str) -> None:
    same = _codes(a, dtype) == _codes(b, dtype)
    x, y = (to_values(bits, dtype).astype(np.float64) for bits in (a, b))
    # NaN compares as False here.
    finite_x, finite_y = np.abs(x) < _BEYOND, np.abs(y) < _BEYOND
    usable = finite_x & finite_y
    errors = found.errors
    errors.count += x.size
    errors.nan += int(np.isnan(x).sum())
    errors.inf += int(np.isinf(x).sum())
    errors.lost += int((finite_x & ~finite_y).sum())
    found.equal += int(same.sum())
    found.special += int((~usable & ~same).sum())
    if not usable.all():
        x, y = np.where(usable, x, 0.0), np.where(usable, y, 0.0)
    errors.underflows += int(((x != 0) & (y == 0) & usable).sum())
    if same.all():
        errors.add_values(x, x)
        return
    errors.add_values(x, y)
    ratios = np.abs(y - x) / np.abs(x)
    found.max_relative = max(found.max_relative, float(ratios.max(initial=0.0, where=x != 0)))


def _codes(bits: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    if dtype == _PACKED:
        packed = bits.view(np.uint8)
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    return bits.view(f"u{bits.dtype.itemsize}")
