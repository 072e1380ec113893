"""The distribution of values over any number of records: histograms of bit patterns, which merge exactly.

There are two grids of 65,536 patterns. float16 has its own grid. All other dtypes are counted by the bfloat16 pattern
of the value. bfloat16, the 8-bit floats, packed fp4, int8, uint8 and bool are exact there.

float32, float64 and wider integers are rounded to the nearest bfloat16, ties to even. A value of at least 2^-126 moves
by at most 2^-8 of itself, a smaller one by at most 2^-134. If a value would round to Inf, it becomes the largest
finite number. Finite float64 beyond float32's range count as that number, too. Rounding keeps the order, so a quantile
moves no further than a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import to_values, value_table
from capd_client.protocol.dtypes import ITEM_NBYTES

__all__ = ["Distribution", "counted_quantiles", "distribution_of"]

# The number of elements that are processed at once. Their temporary arrays stay small compared to the record.
_BLOCK = 1 << 17
_CODES = 1 << 16
_MAGNITUDE = np.uint16(0x7FFF)
_LARGEST, _INFINITE, _NAN = 0x7F7F, 0x7F80, 0x7FC0
# As bits of float32. NaN has larger bits, too.
_ROUNDS_TO_INFINITE = 0x7F7F_8000
_EXACT_WHOLE = 2.0**53
# The last bits of the mantissa that a coarse distribution merges, and the pattern of Inf. Four bits remain.
_COARSE = {"bfloat16": (3, _INFINITE), "float16": (6, 0x7C00)}
# The occurring patterns and their counts.
Counts = tuple[NDArray[np.uint16], NDArray[np.int64]]


class Distribution:
    """Counts of bit patterns. Not thread-safe.

    It takes 10 bytes for each occurring pattern: some 60 KiB for the values of a layer, at most 2 MiB.

    Attributes:
        exact: Whether no element was rounded to its pattern.
    """

    def __init__(self) -> None:
        self.exact = True
        self._parts: dict[str, list[Counts]] = {}
        # The number of patterns that were added since the parts were last joined.
        self._unjoined = 0
        self._quantiles: dict[tuple[float, ...], list[float] | None] = {}

    def count(self, grid: str, codes: NDArray[np.uint16], counts: NDArray[np.int64]) -> None:
        """Add patterns of the grid "float16" or "bfloat16". The arrays are kept, so they must not change later."""
        self._quantiles.clear()
        parts = self._parts.setdefault(grid, [])
        parts.append((codes, counts))
        self._unjoined += codes.size
        # The parts are joined rarely, so that it costs little.
        if self._unjoined > _CODES:
            self._join()

    def add(self, other: Distribution) -> None:
        """Add all elements of another distribution."""
        self.exact &= other.exact
        other._join()
        for grid, [part] in other._parts.items():
            self.count(grid, *part)

    def _join(self) -> None:
        for parts in self._parts.values():
            parts[:] = [_joined(parts)]
        self._unjoined = 0

    def coarse(self) -> Distribution:
        """Return the same elements in fewer patterns: a value moves by at most 1/32 of itself, and zeros stay zeros.

        Subnormal values move by at most 2^-131, those of float16 by 2^-19.

        It takes some 10 KiB for the values of a layer, at most 80 KiB.
        """
        found = Distribution()
        found.exact = False
        for grid, codes, counts in self.patterns():
            merged, firsts = np.unique(_merged(codes, grid), return_index=True)
            found.count(grid, merged, np.add.reduceat(counts, firsts))
        return found

    def finite(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the occurring finite values, ascending, and the count of each."""
        values, counts = np.empty(0), np.empty(0, np.int64)
        for grid, codes, seen in self.patterns():
            of_codes = value_table(grid)[codes]
            usable = np.isfinite(of_codes)
            values = np.concatenate([values, of_codes[usable]])
            counts = np.concatenate([counts, seen[usable]])
        order = np.argsort(values, kind="stable")
        return values[order], counts[order]

    def specials(self) -> tuple[int, int]:
        """Return the number of NaN, and the number of Inf of either sign."""
        nan = inf = 0
        for grid, codes, seen in self.patterns():
            of_codes = value_table(grid)[codes]
            nan += int(seen[np.isnan(of_codes)].sum())
            inf += int(seen[np.isinf(of_codes)].sum())
        return nan, inf

    def quantiles(self, shares: Sequence[float]) -> list[float] | None:
        """Return quantiles of the finite values, None without finite values. They are interpolated as in numpy."""
        wanted = tuple(shares)
        # JSON, text and pages request the same quantiles.
        if wanted not in self._quantiles:
            self._quantiles[wanted] = counted_quantiles(*self.finite(), wanted)
        return self._quantiles[wanted]

    def patterns(self) -> Iterator[tuple[str, NDArray[np.uint16], NDArray[np.int64]]]:
        """Yield for each grid its name, the occurring patterns, ascending, and the count of each."""
        self._join()
        for grid, [(codes, counts)] in self._parts.items():
            yield grid, codes, counts

    def magnitudes(self) -> Iterator[tuple[str, NDArray[np.uint16], NDArray[np.int64]]]:
        """Yield the same for magnitudes: both signs together, by the pattern of the positive value."""
        for grid, codes, counts in self.patterns():
            counted = _counted(codes & _MAGNITUDE, counts)
            used = np.flatnonzero(counted)
            yield grid, used.astype(np.uint16), counted[used]


def counted_quantiles(
    values: NDArray[np.float64], counts: NDArray[np.int64], shares: Sequence[float]
) -> list[float] | None:
    """Return quantiles of ascending values with these counts, linear between neighbours. None without values."""
    ends = np.cumsum(counts)
    if not ends.size:
        return None
    last = int(ends[-1]) - 1
    places = [share * last for share in shares]
    low, high = (
        values[np.searchsorted(ends, [min(last, math.floor(place) + more) for place in places], side="right")]
        for more in (0, 1)
    )
    rest = np.array(places) - np.floor(places)
    found: list[float] = (low + rest * (high - low)).tolist()
    return found


def distribution_of(bits: NDArray[np.generic], dtype: str) -> Distribution:
    """Return the distribution of a record. `bits` are its stored elements; `dtype` is the torch dtype's name."""
    found = Distribution()
    flat = bits.reshape(-1)
    grid = "float16" if dtype == "float16" else "bfloat16"
    width = _CODES if ITEM_NBYTES[dtype] > 1 else 256
    counted = np.zeros(width, np.int64)
    for at in range(0, flat.size, _BLOCK):
        block = flat[at : at + _BLOCK]
        if dtype in ("float16", "bfloat16"):
            codes: NDArray[np.generic] = block.view(np.uint16)
        elif width == 256:
            codes = block.view(np.uint8)
        else:
            codes, exact = _rounded(block)
            found.exact &= exact
        counted += np.bincount(codes, minlength=width)
    if width == 256:
        counted = _by_value(counted, dtype)
    used = np.flatnonzero(counted)
    found.count(grid, used.astype(np.uint16), counted[used])
    return found


def _merged(codes: NDArray[np.uint16], grid: str) -> NDArray[np.uint16]:
    """Return the middle of each pattern's neighbours, which differ in the last bits only. The order stays.

    Zeros and what is not finite keep their pattern.
    """
    bits, infinite = _COARSE[grid]
    middle = (codes >> bits << bits) + (1 << bits - 1)
    size = codes & 0x7FFF
    return np.where((size == 0) | (size >= infinite), codes, middle).astype(np.uint16)


def _joined(parts: Sequence[Counts]) -> Counts:
    if len(parts) == 1:
        return parts[0]
    codes = np.concatenate([codes for codes, _ in parts])
    weights = np.concatenate([counts for _, counts in parts])
    counted = _counted(codes, weights)
    used = np.flatnonzero(counted)
    return used.astype(np.uint16), counted[used]


def _counted(codes: NDArray[np.uint16], weights: NDArray[np.int64]) -> NDArray[np.int64]:
    # The sums are in float64, which is exact up to 2^53 elements.
    return np.bincount(codes, weights, _CODES).astype(np.int64)


def _rounded(values: NDArray[np.generic]) -> tuple[NDArray[np.uint16], bool]:
    """Return the bfloat16 patterns of values, and whether all are exact."""
    if values.dtype == np.float32:
        bits = values.view(np.uint32)
        if (bits & 0x7FFF_FFFF).max() < _ROUNDS_TO_INFINITE:
            return _nearest(bits), not (bits & 0xFFFF).any()
    return _rounded_with_care(values)


def _nearest(single: NDArray[np.uint32]) -> NDArray[np.uint16]:
    return ((single + (0x7FFF + (single >> 16 & 1))) >> 16).astype(np.uint16)


# float64 values may be beyond float32, and NaNs may be signalling.
@np.errstate(over="ignore", invalid="ignore")
def _rounded_with_care(values: NDArray[np.generic]) -> tuple[NDArray[np.uint16], bool]:
    wide = values.astype(np.float64)
    finite, nan = np.isfinite(wide), np.isnan(wide)
    codes = _nearest(values.astype(np.float32).view(np.uint32))
    beyond = finite & (codes & 0x7FFF >= _INFINITE)
    codes[beyond] = codes[beyond] & 0x8000 | _LARGEST
    codes[nan] = _NAN
    exact = (value_table("bfloat16")[codes] == wide) | ~finite
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        # Beyond this limit the conversion to float64 has rounded, too.
        exact &= np.abs(wide) < _EXACT_WHOLE
    return codes, bool(exact.all())


def _by_value(counted: NDArray[np.int64], dtype: str) -> NDArray[np.int64]:
    """Convert counts of the 256 patterns of an 8-bit dtype to counts of bfloat16 patterns."""
    codes = _patterns(dtype)
    return _counted(codes.ravel(), counted.repeat(codes.shape[1]))


@cache
def _patterns(dtype: str) -> NDArray[np.uint16]:
    """Return the bfloat16 patterns of the values in each byte, exactly: [256, values per byte]."""
    stored = np.arange(256, dtype=np.uint8)
    values = to_values(stored.view(np.int8) if dtype == "int8" else stored, dtype).astype(np.float32)
    return _rounded(values.reshape(256, -1))[0]
