"""Per channel, which is an index of the last axis: how large its values get, and how many of them are outliers.

A few channels that are much larger than the others are what makes low precision hard (Dettmers et al., LLM.int8(),
arXiv 2208.07339; SmoothQuant, arXiv 2211.10438): they set the scale of every block that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import to_values

__all__ = ["MAX_CHANNELS", "OUTLIER_SIGMAS", "Channels", "channels_of"]

MAX_CHANNELS = 4096
"""The most channels that are told apart: of more, neighbours are put together, so that a tally takes at most 64 KiB."""
OUTLIER_SIGMAS = 6.0
_BLOCK = 1 << 17  # elements handled at once


@dataclass(slots=True)
class Channels:
    """Tensors with one number of channels. `add` is exact in any order. Not thread-safe.

    records: how many. channels: the length of the last axis; width: how many neighbours one entry stands for, 1 up to
    MAX_CHANNELS. rows: how many values each channel has. amax: float64 [entries], max|x| of the finite values: those of
    float64 tensors may lie beyond float32. outliers: int64 [entries], how many values have |x| > 6 σ, σ the population
    standard deviation of their own record.
    """

    channels: int
    width: int
    rows: int
    records: int
    amax: NDArray[np.float64]
    outliers: NDArray[np.int64]

    def add(self, other: Channels) -> None:
        """Add tensors with the same number of channels."""
        self.rows += other.rows
        self.records += other.records
        self.amax = np.maximum(self.amax, other.amax)
        self.outliers = self.outliers + other.outliers

    @property
    def outlier_percent(self) -> float:
        """100 * outliers / elements."""
        elements = self.rows * self.channels
        return 100 * int(self.outliers.sum()) / elements if elements else 0.0

    @property
    def amax_ratio(self) -> float | None:
        """The largest channel's amax over the median one's; None where the median is 0."""
        return float(self.amax.max()) / self.median if self.median else None

    @property
    def median(self) -> float:
        """The median channel's amax; 0 without channels."""
        if not self.amax.size:
            return 0.0
        with np.errstate(over="ignore"):  # the sum of the two in the middle, where they are float64's largest
            return min(float(np.median(self.amax)), float(self.amax.max()))

    def largest(self, number: int) -> list[tuple[int, float, int]]:
        """The channels with the largest amax, descending: the first index of the entry, its amax, its outliers."""
        order = np.argsort(-self.amax, kind="stable")[:number]
        return [(int(at) * self.width, float(self.amax[at]), int(self.outliers[at])) for at in order]


def channels_of(bits: NDArray[np.generic], dtype: str, std: float | None) -> Channels | None:
    """The channels of one record. bits: as stored; dtype: the torch dtype's name; std: of its finite values.

    None for a tensor without a last axis, or without values.
    """
    if not bits.ndim or not bits.size:
        return None
    length = bits.shape[-1] * (2 if dtype == "float4_e2m1fn_x2" else 1)
    width = -(-length // MAX_CHANNELS)
    limit = np.inf if std is None else OUTLIER_SIGMAS * std
    amax, outliers = np.zeros(length, np.float64), np.zeros(length, np.int64)
    for magnitude in _rows(bits, dtype):
        np.maximum(amax, magnitude.max(0), out=amax)
        with np.errstate(over="ignore"):  # a limit beyond float32: nothing there is
            outliers += (magnitude > limit).sum(0)
    starts = np.arange(0, length, width)
    largest = np.maximum.reduceat(amax, starts)
    return Channels(length, width, bits.size // bits.shape[-1], 1, largest, np.add.reduceat(outliers, starts))


def _rows(bits: NDArray[np.generic], dtype: str) -> Iterator[NDArray[np.floating]]:
    """Magnitudes [rows, channels], NaN and Inf as 0."""
    rows = bits.reshape(-1, bits.shape[-1])
    step = max(1, _BLOCK // bits.shape[-1])
    for start in range(0, len(rows), step):
        values = to_values(rows[start : start + step], dtype)
        magnitude = np.abs(values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32))
        magnitude[~np.isfinite(magnitude)] = 0.0
        yield magnitude
