"""The statistics of records: one definition, additive, so that any group of records merges exactly.

count, nan, inf and zero count elements (-0 is a zero). min, max, absmax and the sums of the first four powers cover the
finite elements. Sums accumulate in float64. mean, std, kurtosis and crest derive from them, for the population of the
finite elements: std is sqrt(sum_sq/n - mean²), kurtosis the fourth central moment over std⁴ (3 for a normal
distribution), and crest absmax over the root of the mean square.

The exponent histogram has 256 bins. A bin is the biased exponent field of the value as float32:

- 0: zeros and float32 subnormals
- 1-254: 2^(bin-127) ≤ |x| < 2^(bin-126)
- 255: NaN and Inf

A finite float64 beyond float32 falls into bin 0 or 254. For 8- and 16-bit dtypes all statistics derive from one
histogram of the bit patterns. Packed fp4 counts both of its values. docs/statistics.md has the full definition and the
exactness of each number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Optional

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from capd.store.format.dtypes import value_table
from capd.store.format.frames import Number, StatsRow
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.statistics_row import POWER_SUMS

__all__ = [
    "Stats", "exponent_bins", "is_possible", "is_whole", "merge", "merge_stats", "public", "summarise",
    "summarise_rows",
]  # fmt: skip

# Any bit pattern is possible. Signalling NaNs make casts "invalid". Squares of large float64 values overflow to Inf.
_quiet = np.errstate(over="ignore", under="ignore", invalid="ignore")
_BINS = 256
# A variance below this share of the mean square is lost in the rounding of its fourth power.
_UNVARIED = 1e-4
# The elements of one pass. The working set stays in the L2 cache.
_BLOCK = 1 << 17


@dataclass(frozen=True, slots=True)
class Stats:
    """The statistics as users read them. Extremes and mean are None if there is no finite element."""

    count: int
    nan: int
    inf: int
    zero: int
    min: Optional[Number]
    max: Optional[Number]
    absmax: Optional[Number]
    mean: Optional[float]
    std: Optional[float]
    sum: float
    sum_sq: float
    exponent_histogram: dict[int, int] = field(repr=False)
    sum_cube: float = 0.0
    sum_fourth: float = 0.0
    kurtosis: Optional[float] = None
    crest: Optional[float] = None


def is_possible(row: StatsRow) -> bool:
    """Return whether a row's counts and bins are possible for any elements. A catalog may hold any numbers."""
    counts = (row.count, row.nan, row.inf, row.zero, *row.exponents[1::2])
    bins = row.exponents[::2]
    return (
        len(row.exponents) % 2 == 0
        and min(counts) >= 0
        and min(bins, default=0) >= 0
        and max(bins, default=0) < _BINS
        and row.nan + row.inf <= row.count
    )


def public(row: StatsRow) -> Stats:
    """Return the user's view of a stored row."""
    finite = row.count - row.nan - row.inf
    mean = row.sum / finite if finite else None
    std = None if mean is None else _std(row.sum_sq / finite, mean)
    bins = dict(zip(row.exponents[::2], row.exponents[1::2], strict=True))
    known = asdict(row)
    del known["exponents"]
    return Stats(
        **known, mean=mean, std=std, exponent_histogram=bins, kurtosis=_kurtosis(row, mean), crest=_crest(row)
    )


def _std(mean_square: float, mean: float) -> float:
    """Return the population std; Inf if the squares exceed float64."""
    return math.sqrt(max(0.0, mean_square - mean * mean)) if math.isfinite(mean_square) else math.inf


def _kurtosis(row: StatsRow, mean: Optional[float]) -> Optional[float]:
    """Return the fourth central moment over the square of the variance; 3 for a normal distribution.

    None if the elements do not vary beyond the rounding of the sums, or if a sum is not finite. Source: K. Pearson,
    Biometrika 4 (1905), 169-212. arXiv 2602.02047 plots it of activations.
    """
    # Only zeros have no fourth powers, and rows of version 1.
    if mean is None or not row.sum_fourth:
        return None
    finite = row.count - row.nan - row.inf
    square, cube, fourth = row.sum_sq / finite, row.sum_cube / finite, row.sum_fourth / finite
    variance = square - mean * mean
    # The sums of a store may be any numbers.
    if not all(map(math.isfinite, (mean, square, cube, fourth))) or variance <= _UNVARIED * square:
        return None
    central = fourth - 4 * mean * cube + 6 * mean * mean * square - 3 * mean * mean * mean * mean
    # The square of a variance below 1e-162 is 0. Cancellation can leave less than the least of any distribution.
    return max(1.0, central / squared) if (squared := variance * variance) else None


def _crest(row: StatsRow) -> Optional[float]:
    """Return absmax over the root of the mean square. None if no finite element differs from zero."""
    finite = row.count - row.nan - row.inf
    if row.absmax is None or not finite or not 0 < row.sum_sq < math.inf:
        return None
    return float(row.absmax) / math.sqrt(row.sum_sq / finite)


def _pick(
    choose: Callable[[Number, Number], Number], a: Optional[Number], b: Optional[Number]
) -> Optional[Number]:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def merge(a: StatsRow, b: StatsRow) -> StatsRow:
    """Return the statistics of the union of two sets of elements."""
    higher = _higher_sums(a, b)
    bins = dict(zip(a.exponents[::2], a.exponents[1::2], strict=True))
    for exponent, count in zip(b.exponents[::2], b.exponents[1::2], strict=True):
        bins[exponent] = bins.get(exponent, 0) + count
    return StatsRow(
        a.count + b.count,
        a.nan + b.nan,
        a.inf + b.inf,
        a.zero + b.zero,
        _pick(min, a.min, b.min),
        _pick(max, a.max, b.max),
        _pick(max, a.absmax, b.absmax),
        a.sum + b.sum,
        a.sum_sq + b.sum_sq,
        [number for pair in sorted(bins.items()) for number in pair],
        *higher,
    )


def _higher_sums(a: StatsRow, b: StatsRow) -> tuple[float, float]:
    """Return the sums of cubes and fourth powers of both, 0 if one of them has none: a row of version 1."""
    if _lacks_powers(a) or _lacks_powers(b):
        return 0.0, 0.0
    return a.sum_cube + b.sum_cube, a.sum_fourth + b.sum_fourth


def _lacks_powers(row: StatsRow) -> bool:
    # Fourth powers below 1e-77 are 0 in float64.
    square = float(row.absmax or 0) * float(row.absmax or 0)
    return not row.sum_fourth and square * square > 0


def merge_stats(group: Iterable[Stats]) -> Stats:
    """Return the statistics of all elements of a group of records (layers, ranks, steps).

    The sums are added without rounding and rounded once, so the order of the records makes no difference. An empty
    group has a count of 0 and no extremes, like an empty tensor.
    """
    rows = [
        StatsRow(
            stats.count, stats.nan, stats.inf, stats.zero, stats.min, stats.max, stats.absmax, stats.sum,
            stats.sum_sq, [number for pair in stats.exponent_histogram.items() for number in pair],
            stats.sum_cube, stats.sum_fourth,
        )
        for stats in group
    ]  # fmt: skip
    together = reduce(merge, rows, StatsRow())
    known = POWER_SUMS if together.sum_fourth else ()
    for name in ("sum", "sum_sq", *known):
        setattr(together, name, _total(getattr(row, name) for row in rows))
    return public(together)


def _total(terms: Iterable[float]) -> float:
    known = list(terms)
    try:
        return math.fsum(known)
    except (OverflowError, ValueError):
        # The total exceeds float64, or Inf occurs with both signs.
        return sum(known)


@_quiet
def exponent_bins(values: NDArray[np.generic]) -> NDArray[np.uint16]:
    """Return the exponent bin of each value (see the module docstring)."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bins = (single.view(np.uint32) >> 23 & 0xFF).astype(np.uint16)
    if values.dtype.itemsize == 8:
        bins[(bins == 255) & np.isfinite(values)] = 254
    return bins


def _from_histogram(histogram: NDArray[np.int64], dtype: str) -> StatsRow:
    # Only a few thousand of the 65,536 codes occur.
    used = np.flatnonzero(histogram)
    counts, values = histogram[used], value_table(dtype)[used]
    # Packed fp4 has two values per code.
    counts = np.broadcast_to(counts if values.ndim == 1 else counts[:, None], values.shape)
    finite, nan = np.isfinite(values), int(counts[np.isnan(values)].sum())
    seen = values[finite]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (None, None)
    total, weights = int(counts.sum()), counts.astype(np.float64)
    bins = np.bincount(exponent_bins(values).ravel(), weights=weights.ravel(), minlength=_BINS)
    values = np.where(finite, values, 0.0)
    return StatsRow(
        total,
        nan,
        total - nan - int(counts[finite].sum()),
        int(counts[finite & (values == 0)].sum()),
        _exact(low, dtype),
        _exact(high, dtype),
        None if low is None or high is None else _exact(max(abs(low), abs(high)), dtype),
        # This is no dot product: BLAS would start threads of its own.
        float((weights * values).sum()),
        float((weighted := weights * values * values).sum()),
        _sparse_rows(bins.astype(np.int64)[None])[0],
        float((weighted := weighted * values).sum()),
        float((weighted * values).sum()),
    )


def _exact(number: Optional[Number], dtype: str) -> Optional[Number]:
    return int(number) if number is not None and is_whole(dtype) else number


def is_whole(dtype: str) -> bool:
    """Return whether the extremes of this torch dtype are whole numbers, which are kept as ints."""
    return "int" in dtype or dtype == "bool"


def summarise(bits: NDArray[np.generic], dtype: str) -> StatsRow:
    """Return the statistics of one array of stored bits of torch dtype `dtype`, in one pass over blocks."""
    flat = bits.reshape(-1)
    if flat.dtype.itemsize == 2 and flat.size < _BLOCK:
        # A histogram of 65,536 codes costs more than so few elements.
        return summarise_rows(flat[None], dtype)[0]
    if ITEM_NBYTES[dtype] <= 2:
        width = 1 << (8 * flat.dtype.itemsize)
        codes = flat.view(np.uint8 if width == 256 else np.uint16)
        histogram = np.zeros(width, dtype=np.int64)
        for start in range(0, codes.size, _BLOCK):
            histogram += np.bincount(codes[start : start + _BLOCK], minlength=width)
        return _from_histogram(histogram, dtype)
    blocks = [flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK)] or [flat]
    return reduce(merge, (summarise_rows(block[None], dtype)[0] for block in blocks))


def summarise_rows(bits: NDArray[np.generic], dtype: str) -> list[StatsRow]:
    """Return the statistics of each row of [rows, elements] stored bits: one vectorised pass for many small records."""
    rows = bits.shape[0]
    if bits.size == 0:
        return [StatsRow() for _ in range(rows)]
    bits = bits.reshape(rows, -1)
    together = max(1, _BLOCK // bits.shape[1])
    return [row for at in range(0, rows, together) for row in _rows(bits[at : at + together], dtype)]


@_quiet
def _rows(bits: NDArray[np.generic], dtype: str) -> list[StatsRow]:
    rows = bits.shape[0]
    values: NDArray[np.generic]
    exponents: NDArray[np.unsignedinteger[Any]]
    if dtype == "bfloat16":
        codes = bits.view(np.uint16)
        values = np.left_shift(codes, 16, dtype=np.uint32).view(np.float32)
        exponents = (codes >> 7 & 0xFF).astype(np.uint16, copy=False)
    else:
        values = bits
        if bits.dtype.itemsize == 1:
            values = value_table(dtype)[bits.view(np.uint8)].reshape(rows, -1)
        exponents = exponent_bins(values)
    bins = _histograms(exponents)
    none = [0] * rows
    nan, infinite, zero = none, none, none
    lows: list[Optional[Number]] = values.min(axis=1).tolist()
    highs: list[Optional[Number]] = values.max(axis=1).tolist()
    wide = values.astype(np.float64)
    if bins[:, 0].any():
        zero = np.count_nonzero(wide == 0, axis=1).tolist()
    if values.dtype.kind == "f" and bins[:, 255].any():
        finite, nans = np.isfinite(wide), np.isnan(wide).sum(axis=1)
        nan, infinite = nans.tolist(), ((~finite).sum(axis=1) - nans).tolist()
        some: list[bool] = finite.any(axis=1).tolist()  # type: ignore[assignment]
        lows = _where(some, np.where(finite, wide, np.inf).min(axis=1).tolist())
        highs = _where(some, np.where(finite, wide, -np.inf).max(axis=1).tolist())
        wide[~finite] = 0.0
    sums = wide.sum(axis=1).tolist()
    square = wide * wide
    squares = square.sum(axis=1).tolist()
    # Of two operands `einsum` makes one pass, in this thread and without a temporary.
    cubes, fourths = (np.einsum("ij,ij->i", one, square).tolist() for one in (wide, square))
    if is_whole(dtype):
        lows, highs = [_exact(low, dtype) for low in lows], [_exact(high, dtype) for high in highs]
    largest = [
        None if low is None or high is None else max(abs(low), abs(high))
        for low, high in zip(lows, highs, strict=True)
    ]
    count = [values.shape[1]] * rows
    columns = (
        count, nan, infinite, zero, lows, highs, largest, sums, squares, _sparse_rows(bins), cubes, fourths,
    )  # fmt: skip
    return [StatsRow(*row) for row in zip(*columns, strict=True)]


def _histograms(exponents: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.int64]:
    """Return 256 bins for each row of [rows, elements] exponents."""
    rows = len(exponents)
    row = np.arange(rows, dtype=np.uint16 if rows <= 256 else np.intp)[:, None] * 256
    return np.bincount(np.add(exponents, row, dtype=row.dtype).ravel(), minlength=rows * 256).reshape(
        rows, 256
    )


def _where(some: list[bool], ends: list[Optional[Number]]) -> list[Optional[Number]]:
    return [end if is_some else None for is_some, end in zip(some, ends, strict=True)]


def _sparse_rows(bins: NDArray[np.int64]) -> list[list[int]]:
    # Only a few dozen of the 256 bins occur.
    present = np.flatnonzero(bins.any(axis=0))
    bins = bins[:, present]
    at, used = np.nonzero(bins)
    flat = np.stack([present[used], bins[at, used]], axis=-1).ravel().tolist()
    ends = (2 * np.cumsum(np.bincount(at, minlength=len(bins)))).tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
