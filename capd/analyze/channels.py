"""The channels of tensors, which are the indices of the last axis: their largest magnitudes and outliers.

Low precision is hard if a few channels are much larger than the others. These channels set the scale of every block
that they share. Sources: Dettmers et al., LLM.int8(), arXiv 2208.07339; SmoothQuant, arXiv 2211.10438.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import to_values, value_table

__all__ = ["MAX_CHANNELS", "OUTLIER_SIGMAS", "Channels", "channels_of"]

MAX_CHANNELS = 4096
"""The most channels that are kept apart. If there are more, neighbours are merged, so a tally takes at most 64 KiB."""
OUTLIER_SIGMAS = 6.0
# The number of elements that are processed at once.
_BLOCK = 1 << 17
# The pattern of Inf in the dtypes whose magnitudes are compared by their bit patterns, which have the same order.
_INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00}
_MOST_IN_BYTE = 255
Magnitudes = NDArray[np.floating] | NDArray[np.uint16]


@dataclass(slots=True)
class Channels:
    """The channels of tensors with one number of channels. `add` is exact in any order. Not thread-safe.

    Attributes:
        channels: The length of the last axis.
        width: The number of neighbouring channels in one entry, 1 up to MAX_CHANNELS.
        rows: The number of values of each channel.
        records: The number of tensors.
        amax: float64 [entries], max|x| of the finite values. float64 tensors may have values beyond float32.
        outliers: int64 [entries], the number of values with |x| > 6 σ. σ is the population standard deviation of the
            value's own record.
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
        """The amax of the largest channel over that of the median one, None if the median is 0."""
        return float(self.amax.max()) / self.median if self.median else None

    @property
    def median(self) -> float:
        """The amax of the median channel, 0 without channels."""
        if not self.amax.size:
            return 0.0
        # The median is a mean of two numbers, whose sum may exceed float64.
        with np.errstate(over="ignore"):
            return min(float(np.median(self.amax)), float(self.amax.max()))

    def largest(self, number: int) -> list[tuple[int, float, int]]:
        """Return the channels with the largest amax, descending: first index of the entry, its amax, its outliers."""
        order = np.argsort(-self.amax, kind="stable")[:number]
        return [(int(at) * self.width, float(self.amax[at]), int(self.outliers[at])) for at in order]


def channels_of(bits: NDArray[np.generic], dtype: str, std: float | None) -> Channels | None:
    """Return the channels of one record, None for a tensor without a last axis or without values.

    Args:
        bits: The stored elements.
        dtype: The torch dtype's name.
        std: The standard deviation of the finite values.
    """
    if not bits.ndim or not bits.size:
        return None
    length = bits.shape[-1] * (2 if dtype == "float4_e2m1fn_x2" else 1)
    width = -(-length // MAX_CHANNELS)
    limit = np.inf if std is None else OUTLIER_SIGMAS * std
    if dtype in _INFINITE:
        limit = int(np.searchsorted(_finite(dtype), limit, side="right")) - 1
    amax, outliers = np.zeros(length, np.float64), np.zeros(length, np.int64)
    for magnitude in _rows(bits, dtype):
        most = magnitude.max(0)
        np.maximum(amax, most, out=amax)
        # The limit may be beyond float32. Then no value exceeds it.
        with np.errstate(over="ignore"):
            if (most > limit).any():
                outliers += _true_by_channel(magnitude > limit)
    if dtype in _INFINITE:
        amax = _finite(dtype)[amax.astype(np.int64)]
    starts = np.arange(0, length, width)
    largest = np.maximum.reduceat(amax, starts)
    return Channels(length, width, bits.size // bits.shape[-1], 1, largest, np.add.reduceat(outliers, starts))


def _finite(dtype: str) -> NDArray[np.float64]:
    """Return the finite magnitudes of a 16-bit dtype by their bit patterns, ascending."""
    return value_table(dtype)[: _INFINITE[dtype]]


def _rows(bits: NDArray[np.generic], dtype: str) -> Iterator[Magnitudes]:
    """Yield magnitudes [rows, channels], with 0 for NaN and Inf; those of bfloat16 and float16 as bit patterns."""
    rows = bits.reshape(-1, bits.shape[-1])
    step = max(1, _BLOCK // bits.shape[-1])
    magnitudes = _patterns if dtype in _INFINITE else _values
    for start in range(0, len(rows), step):
        yield magnitudes(rows[start : start + step], dtype)


def _patterns(bits: NDArray[np.generic], dtype: str) -> Magnitudes:
    magnitude: NDArray[np.uint16] = bits.view(np.uint16) & np.uint16(0x7FFF)
    if magnitude.max() >= _INFINITE[dtype]:
        magnitude[magnitude >= _INFINITE[dtype]] = 0
    return magnitude


def _values(bits: NDArray[np.generic], dtype: str) -> Magnitudes:
    values = to_values(bits, dtype)
    magnitude: NDArray[np.floating] = np.abs(
        values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)
    )
    magnitude[~np.isfinite(magnitude)] = 0.0
    return magnitude


def _true_by_channel(which: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of true elements in each column. Sums of bytes are many times faster than those of int64."""
    ends = range(0, len(which), _MOST_IN_BYTE)
    parts = [which[at : at + _MOST_IN_BYTE].view(np.uint8).sum(0, dtype=np.uint8) for at in ends]
    found: NDArray[np.int64] = np.sum(parts, axis=0, dtype=np.int64)
    return found
