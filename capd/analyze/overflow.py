"""What lies outside of a format's range: shares above its largest and below its smallest value, and NaN and Inf.

Everything is counted from a histogram of bit patterns, so it is exact where that is, and merges as that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.distribution import Distribution

if TYPE_CHECKING:
    from capd.analyze.grids import Grid

__all__ = ["HIGH_PERCENT", "MODERATE_PERCENT", "Overflow", "overflow_of", "severity"]

MODERATE_PERCENT, HIGH_PERCENT = 0.1, 1.0
"""Shares from which on the predecessor called an overflow or an underflow moderate and high."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """Counts over some elements. All but `nan` and `inf` are of finite ones.

    label: the grid's. scaled: whether one scale took the largest magnitude to the grid's largest value. above:
    |x| > largest. below: 0 < |x| < smallest, whether or not rounding would take it up to that. flushed:
    0 < |x| < normal, `below` included. count: all elements.
    """

    label: str
    scaled: bool
    count: int
    nan: int
    inf: int
    zero: int
    above: int
    below: int
    flushed: int

    @property
    def above_percent(self) -> float | None:
        """100 * above / count, the predecessor's overflow; None where there is no element."""
        return self._percent(self.above)

    @property
    def below_percent(self) -> float | None:
        """100 * below / count, the predecessor's underflow: |x| under the smallest denormal."""
        return self._percent(self.below)

    @property
    def flushed_percent(self) -> float | None:
        """100 * flushed / count, the predecessor's flush: |x| under the smallest normal value."""
        return self._percent(self.flushed)

    @property
    def nonfinite_percent(self) -> float | None:
        """100 * (nan + inf) / count: what no format's range takes in."""
        return self._percent(self.nan + self.inf)

    def _percent(self, number: int) -> float | None:
        return 100 * number / self.count if self.count else None


def severity(percent: float | None) -> str:
    """What the predecessor called a share: "none", "low", "moderate" above 0.1 %, "high" above 1 %."""
    if not percent:
        return "none"
    return "high" if percent > HIGH_PERCENT else "moderate" if percent > MODERATE_PERCENT else "low"


def overflow_of(distribution: Distribution, grid: Grid, *, scaled: bool = False) -> Overflow:
    """What of these elements lies outside of the grid.

    scaled: after one scale for all of them that takes their largest magnitude to the grid's largest value, as
    per-tensor scaling does with a tensor; nothing is above then.
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
        scaled=scaled,
        count=int(counts.sum()) + nan + inf,
        nan=nan,
        inf=inf,
        zero=zero,
        above=0 if scaled else int(counts[sizes > grid.largest].sum()),
        below=under(grid.smallest),
        flushed=under(grid.normal),
    )
