"""The blocks of a format with scales: their scales, how many saturate, and each block's error.

All numbers are counts, so tallies add up exactly in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capd.analyze.distribution import counted_quantiles
from capd.store.format.dtypes import value_table

__all__ = ["BlockStatistics", "Histogram", "histogram_of", "sqnr_histogram"]

Histogram = Counter[int]
_E8M0_BIAS = 127
# The limits to which the SQNR of a block is clipped.
_LEAST_DB, _MOST_DB = -100, 400


@dataclass(slots=True)
class BlockStatistics:
    """Counts over blocks. Not thread-safe.

    Attributes:
        scale_type: "e8m0", "e4m3", or "float32".
        count: All blocks.
        zero: The blocks that contain only zeros. The following counts leave them out.
        invalid: The blocks whose scale is NaN, because they contain an Inf or a NaN.
        saturated: The blocks with an element beyond the range of the scale, which `floor` and `even` allow (OCP MX
            v1.0, §6.3).
        scales: The count of each scale, by its stored byte. float32 scales are counted by floor(log2).
        sqnr: The number of blocks for each floor of the SQNR in dB (`sqnr_histogram`), if it was requested.
        exact: The number of blocks without an error, if it was requested.
    """

    scale_type: str
    count: int = 0
    zero: int = 0
    invalid: int = 0
    saturated: int = 0
    scales: Histogram = field(default_factory=Counter)
    sqnr: Histogram | None = None
    exact: int = 0

    def add(self, other: BlockStatistics) -> None:
        """Add the blocks of another tally of the same format."""
        self.count += other.count
        self.zero += other.zero
        self.invalid += other.invalid
        self.saturated += other.saturated
        self.exact += other.exact
        self.scales.update(other.scales)
        if other.sqnr is not None:
            self.sqnr = (self.sqnr or Counter()) + other.sqnr

    @property
    def saturated_percent(self) -> float | None:
        """100 * saturated / count: the share of blocks whose largest element is clipped."""
        return 100 * self.saturated / self.count if self.count else None

    def exponents(self) -> dict[int, int]:
        """Return the number of scales for each floor(log2(scale)), ascending."""
        found: Histogram = Counter()
        for code, count in self.scales.items():
            value = self._log2(code)
            if value is not None:
                found[math.floor(value)] += count
        return dict(sorted(found.items()))

    @property
    def scale_log2_mean(self) -> float | None:
        """The mean of log2(scale)."""
        return self._moments()[0]

    @property
    def scale_log2_std(self) -> float | None:
        """The population standard deviation of log2(scale), which says how much the blocks of a tensor differ."""
        return self._moments()[1]

    def sqnr_quantiles(self, shares: tuple[float, ...]) -> list[float] | None:
        """Return the SQNR quantiles of the blocks with an error, in dB, to 1 dB. None if no block has an error."""
        if not self.sqnr:
            return None
        values = np.array(sorted(self.sqnr), np.float64)
        counts = np.array([self.sqnr[int(value)] for value in values], np.int64)
        return counted_quantiles(values, counts, shares)

    def _moments(self) -> tuple[float | None, float | None]:
        pairs = [(self._log2(code), count) for code, count in sorted(self.scales.items())]
        known = [(value, count) for value, count in pairs if value is not None]
        total = sum(count for _, count in known)
        if not total:
            return None, None
        mean = math.fsum(value * count for value, count in known) / total
        square = math.fsum((value - mean) ** 2 * count for value, count in known) / total
        return mean, math.sqrt(square)

    def _log2(self, code: int) -> float | None:
        if self.scale_type == "e4m3":
            value = float(value_table("float8_e4m3fn")[code])
            return math.log2(value) if value > 0 else None
        return float(code - _E8M0_BIAS if self.scale_type == "e8m0" else code)


def histogram_of(values: NDArray[np.generic], counts: NDArray[np.int64] | None = None) -> Histogram:
    """Return the count of each of some whole numbers, which occur once each or `counts` times."""
    present, at = np.unique(values, return_inverse=True)
    often = np.bincount(at, counts, present.size).astype(np.int64)
    return Counter(dict(zip(present.astype(np.int64).tolist(), often.tolist(), strict=True)))


def sqnr_histogram(signal: NDArray[np.float64], noise: NDArray[np.float64]) -> tuple[Histogram, int]:
    """Return the number of blocks for each floor(10 * log10(signal / noise)), limited to -100 … 400 dB.

    Args:
        signal: Σx² of each block, [blocks]. A block without signal counts nowhere.
        noise: Σd² of each block, [blocks].

    Returns:
        The histogram, and the number of blocks with a signal but without noise.
    """
    usable = (signal > 0) & (noise > 0)
    levels = np.floor(10 * (np.log10(signal[usable]) - np.log10(noise[usable])))
    found = histogram_of(np.clip(levels, _LEAST_DB, _MOST_DB))
    return found, int(((signal > 0) & (noise == 0)).sum())
