"""Two Triton kernels that compute the rows of many tensors on a GPU in one pass. Importing this imports Triton.

Each program of the first kernel reads one share of one segment and writes a row of partial results. The second kernel
merges these rows, segment by segment. No row has atomic additions, and shares depend on the length of the segment
alone, so the same bits always have the same row. Whole blocks are read without a mask, because a masked read is not
vectorised.

Sums are float64. Extremes are float32 and exact, because every dtype here converts to float32 without rounding.

`capd_client.rowkernel.artifacts.TABLE_FIELDS` defines the table of segments. The integers are never specialised,
because a new size must not compile anything.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from capd_client.protocol.statistics_row import BINS, ROW_VALUES
from capd_client.rowkernel.artifacts import BLOCK, COLUMNS, ROWS, SEGMENTS, WARPS

__all__ = [
    "COMPILED",
    "OPTIONS",
    "merge_constants",
    "merged_rows",
    "partial_constants",
    "partial_rows",
]

# Triton fuses by default. Some versions warn that the default will change, unless it is set.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": True}

_VALUES = tl.constexpr(ROW_VALUES)
_HEAD = tl.constexpr(BINS.start)
_POWERS = tl.constexpr(BINS.stop)
_WORDS = {"bfloat16": tl.bfloat16, "float32": tl.float32, "float16": tl.float16}


def partial_constants(dtype: str) -> dict[str, Any]:
    """Return the constants for which `partial_rows` is compiled: the words of a dtype, by torch's name.

    8-bit formats are words of their codes. All formats with one value per code share a kernel.
    """
    word = _WORDS.get(dtype, tl.uint8)
    width = 0 if dtype in _WORDS else 2 if dtype == "float4_e2m1fn_x2" else 1
    # The number of words that a thread reads at once, so that folding them needs no exchange between threads.
    fold = 16 * 8 // word.primitive_bitwidth
    return {"WORD": word, "WIDTH": width, "BLOCK": BLOCK, "FOLD": fold, "SEGMENTS": SEGMENTS}


def merge_constants() -> dict[str, Any]:
    """Return the constants for which `merged_rows` is compiled."""
    return {"COLUMNS": COLUMNS, "ROWS": ROWS}


@triton.jit
def _take(values, kept, sums, squares, cubes, fourths, low, high, nan, zero, bins, FOLD: tl.constexpr):
    """Add one block of values to the results of this program; values that are not `kept` add nothing."""
    # Converted by its bits, because not every conversion keeps subnormals.
    if values.dtype == tl.bfloat16:
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    values = values.to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Compared by their bits as well, because a comparison may treat subnormals as zero.
    exponents = bits >> 23
    finite = kept & (exponents < 255)
    wide = tl.where(finite, values, 0.0).to(tl.float64)
    folded: tl.constexpr = values.shape[0] // FOLD
    wide = tl.reshape(wide, [folded, FOLD], can_reorder=True)
    sums += tl.sum(wide, axis=1)
    square = wide * wide
    squares += tl.sum(square, axis=1)
    cubes += tl.sum(square * wide, axis=1)
    fourths += tl.sum(square * square, axis=1)
    least = tl.reshape(tl.where(finite, values, float("inf")), [folded, FOLD], can_reorder=True)
    most = tl.reshape(tl.where(finite, values, float("-inf")), [folded, FOLD], can_reorder=True)
    low = tl.minimum(low, tl.min(least, axis=1))
    high = tl.maximum(high, tl.max(most, axis=1))
    is_nan = (kept & (bits > 0x7F800000)).to(tl.int32)
    is_zero = (kept & (bits == 0)).to(tl.int32)
    nan += tl.sum(tl.reshape(is_nan, [folded, FOLD], can_reorder=True), axis=1)
    zero += tl.sum(tl.reshape(is_zero, [folded, FOLD], can_reorder=True), axis=1)
    bins += tl.histogram(tl.where(kept, exponents, 0), 256)
    return sums, squares, cubes, fourths, low, high, nan, zero, bins


@triton.jit(do_not_specialize=["segments"])
def partial_rows(
    segment_table, value_table, parts, segments: tl.int64,
    WORD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Compute one task: the partial row of a share of a segment. value_table: float32 [256, WIDTH] by 8-bit code."""
    task = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SEGMENTS)
    there = index < segments
    firsts = tl.load(segment_table + 3 * segments + index, mask=there, other=0)
    segment = tl.sum((there & (firsts <= task)).to(tl.int32)) - 1
    entry = segment_table + segment
    share = tl.load(entry + 4 * segments)
    # Both hints are needed: a sum of pointers loses the hint of its parts, and is then read word by word.
    start = tl.multiple_of((task - tl.load(entry + 3 * segments)) * share, BLOCK)
    count = tl.minimum(share, tl.load(entry + segments) - start)
    words = tl.multiple_of(tl.load(entry).to(tl.pointer_type(WORD)), 16) + start

    lanes = tl.arange(0, BLOCK)
    folded: tl.constexpr = BLOCK // FOLD
    sums, squares = tl.zeros([folded], tl.float64), tl.zeros([folded], tl.float64)
    cubes, fourths = tl.zeros([folded], tl.float64), tl.zeros([folded], tl.float64)
    low, high = tl.full([folded], float("inf"), tl.float32), tl.full([folded], float("-inf"), tl.float32)
    nan, zero = tl.zeros([folded], tl.int32), tl.zeros([folded], tl.int32)
    bins = tl.zeros([256], tl.int32)
    whole = count // BLOCK
    kept = lanes >= 0
    block = whole * 0
    # A while loop, because Triton's interpreter cannot count up to a number that it has loaded.
    while block < whole:
        read = tl.load(words + block * BLOCK + lanes)
        if WIDTH == 0:
            sums, squares, cubes, fourths, low, high, nan, zero, bins = _take(
                read, kept, sums, squares, cubes, fourths, low, high, nan, zero, bins, FOLD
            )
        for column in tl.static_range(WIDTH):
            values = tl.load(value_table + read.to(tl.int32) * WIDTH + column)
            sums, squares, cubes, fourths, low, high, nan, zero, bins = _take(
                values, kept, sums, squares, cubes, fourths, low, high, nan, zero, bins, FOLD
            )
        block += 1
    rest = count - whole * BLOCK
    if rest > 0:
        kept = lanes < rest
        read = tl.load(words + whole * BLOCK + lanes, mask=kept, other=0)
        if WIDTH == 0:
            sums, squares, cubes, fourths, low, high, nan, zero, bins = _take(
                read, kept, sums, squares, cubes, fourths, low, high, nan, zero, bins, FOLD
            )
        for column in tl.static_range(WIDTH):
            values = tl.load(value_table + read.to(tl.int32) * WIDTH + column)
            sums, squares, cubes, fourths, low, high, nan, zero, bins = _take(
                values, kept, sums, squares, cubes, fourths, low, high, nan, zero, bins, FOLD
            )
        values_per_word: tl.constexpr = 2 if WIDTH == 2 else 1
        # The values that were not kept were counted in bin 0.
        beyond = (BLOCK - rest).to(tl.int32) * values_per_word
        bins -= tl.where(tl.arange(0, 256) == 0, beyond, 0)

    row = parts + task * _VALUES
    exponents = tl.arange(0, 256)
    nans = tl.sum(nan)
    least, most = tl.min(low).to(tl.float64), tl.max(high).to(tl.float64)
    tl.store(row, tl.sum(bins).to(tl.float64))
    tl.store(row + 1, nans.to(tl.float64))
    tl.store(row + 2, (tl.sum(tl.where(exponents == 255, bins, 0)) - nans).to(tl.float64))
    tl.store(row + 3, tl.sum(zero).to(tl.float64))
    tl.store(row + 4, least)
    tl.store(row + 5, most)
    tl.store(row + 6, tl.maximum(-least, most))
    tl.store(row + 7, tl.sum(sums))
    tl.store(row + 8, tl.sum(squares))
    tl.store(row + _POWERS, tl.sum(cubes))
    tl.store(row + _POWERS + 1, tl.sum(fourths))
    tl.store(row + _HEAD + exponents, bins.to(tl.float64))


@triton.jit(do_not_specialize=["segments"])
def merged_rows(segment_table, parts, segments: tl.int64, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Merge one group of columns of one segment's row, from the partial rows of its tasks."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    entry = segment_table + tl.program_id(1)
    row = tl.load(entry + 2 * segments).to(tl.pointer_type(tl.float64))
    parts += tl.load(entry + 3 * segments) * _VALUES
    share = tl.load(entry + 4 * segments)
    count = (tl.load(entry + segments) + share - 1) // share
    total = tl.zeros([COLUMNS], tl.float64)
    least = tl.full([COLUMNS], float("inf"), tl.float64)
    most = tl.full([COLUMNS], float("-inf"), tl.float64)
    first = count * 0
    while first < count:
        part = first + tl.arange(0, ROWS)
        kept = (part < count)[:, None] & (column < _VALUES)[None, :]
        read = tl.load(parts + part[:, None] * _VALUES + column[None, :], mask=kept, other=0.0)
        total += tl.sum(read, axis=0)
        least = tl.minimum(least, tl.min(tl.where(kept, read, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(kept, read, float("-inf")), axis=0))
        first += ROWS
    ends = tl.where(column == 4, least, most)
    # Infinite ends mean that no element was finite.
    ends = tl.where(tl.abs(ends) == float("inf"), float("nan"), ends)
    ends = tl.where(column == 6, tl.abs(ends), ends)
    merged = tl.where((column >= 4) & (column <= 6), ends, total)
    tl.store(row + column, merged, mask=column < _VALUES)


COMPILED = isinstance(partial_rows, triton.JITFunction)
"""Whether launches run on the device. Under TRITON_INTERPRET=1 the host computes, after a wait for the device."""
