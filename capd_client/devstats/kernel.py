"""Rows on a GPU in one pass over the tensor: a Triton kernel, in float64 throughout. Importing it imports Triton.

Every program walks over blocks of its own and leaves one row of partial results; a second kernel merges those. There
are no atomic additions to the row, so the same bits always give the same row. Whole blocks are read without a mask,
because a masked read is not vectorised.

`n` and the other integers are never specialised: a new size must not compile anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capd_client.statistics_row import ROW_VALUES

__all__ = ["ALIGNMENT", "COMPILED", "fill_from_kernel"]

ALIGNMENT = 16  # bytes; Triton compiles another kernel for tensors that begin elsewhere
_BLOCK = 1024  # elements that one program has in its registers
_PROGRAMS_PER_PROCESSOR = 4
_MERGED_COLUMNS, _MERGED_ROWS = 32, 128  # of the partial rows, at once

_VALUES = tl.constexpr(ROW_VALUES)
_HEAD = tl.constexpr(ROW_VALUES - 256)


def fill_from_kernel(words: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
    """Write the row of `words` [n > 0], which begin at a multiple of ALIGNMENT.

    table: float32 [256, 1] or [256, 2], the values of 8-bit codes; [0, 0] where the words are numbers themselves.
    """
    n = words.numel()
    programs = min(triton.cdiv(n, _BLOCK), _PROGRAMS_PER_PROCESSOR * _processors(words.device))
    parts = torch.empty(programs * ROW_VALUES, dtype=torch.float64, device=words.device)
    merging = triton.cdiv(ROW_VALUES, _MERGED_COLUMNS)
    # Fusion is what Triton does without being told; left open, some versions warn that this will change.
    _partial_rows[(programs,)](
        words, table, parts, n, WIDTH=table.shape[1], BLOCK=_BLOCK, enable_fp_fusion=True
    )
    _merged_row[(merging,)](
        parts, row, programs, COLUMNS=_MERGED_COLUMNS, ROWS=_MERGED_ROWS, enable_fp_fusion=True
    )


def _processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 where Triton's interpreter stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _take(values, kept, sums, squares, low, high, nan, zero, bins):
    """One block of values into the results of this program; what is not kept counts for nothing."""
    if values.dtype == tl.bfloat16:  # by its bits: not every conversion keeps subnormals
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    wide = values.to(tl.float64)
    is_nan = wide != wide
    finite = kept & (tl.abs(wide) < float("inf"))  # false for NaN
    plain = tl.where(finite, wide, 0.0)
    sums += plain
    squares += plain * plain
    low = tl.minimum(low, tl.where(finite, wide, float("inf")))
    high = tl.maximum(high, tl.where(finite, wide, float("-inf")))
    nan += (kept & is_nan).to(tl.int32)
    zero += (kept & (wide == 0)).to(tl.int32)
    exponents = (values.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    exponents = tl.where(finite & (exponents == 255), 254, exponents)  # float64 beyond float32
    exponents = tl.where(kept, exponents, 0)
    spare = tl.sum((~kept).to(tl.int32))
    counts = tl.histogram(exponents, 256) - tl.where(tl.arange(0, 256) == 0, spare, 0)
    bins += counts.to(tl.int64)
    return sums, squares, low, high, nan, zero, bins


@triton.jit(do_not_specialize=["n"])
def _partial_rows(words, table, parts, n: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    sums, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    low, high = tl.full([BLOCK], float("inf"), tl.float64), tl.full([BLOCK], float("-inf"), tl.float64)
    nan, zero = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    bins = tl.zeros([256], tl.int64)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    whole = n // BLOCK
    kept = lanes >= 0
    for block in range(program, whole, programs):
        read = tl.load(words + block * BLOCK + lanes)
        if WIDTH == 0:
            sums, squares, low, high, nan, zero, bins = _take(
                read, kept, sums, squares, low, high, nan, zero, bins
            )
        for column in tl.static_range(WIDTH):
            values = tl.load(table + read.to(tl.int32) * WIDTH + column)
            sums, squares, low, high, nan, zero, bins = _take(
                values, kept, sums, squares, low, high, nan, zero, bins
            )
    if program == whole % programs:
        kept = whole * BLOCK + lanes < n
        read = tl.load(words + whole * BLOCK + lanes, mask=kept, other=0)
        if WIDTH == 0:
            sums, squares, low, high, nan, zero, bins = _take(
                read, kept, sums, squares, low, high, nan, zero, bins
            )
        for column in tl.static_range(WIDTH):
            values = tl.load(table + read.to(tl.int32) * WIDTH + column)
            sums, squares, low, high, nan, zero, bins = _take(
                values, kept, sums, squares, low, high, nan, zero, bins
            )
    row = parts + program * _VALUES
    exponents = tl.arange(0, 256)
    nans = tl.sum(nan.to(tl.int64))
    least, most = tl.min(low), tl.max(high)
    tl.store(row, tl.sum(bins).to(tl.float64))
    tl.store(row + 1, nans.to(tl.float64))
    tl.store(row + 2, (tl.sum(tl.where(exponents == 255, bins, 0)) - nans).to(tl.float64))
    tl.store(row + 3, tl.sum(zero.to(tl.int64)).to(tl.float64))
    tl.store(row + 4, least)
    tl.store(row + 5, most)
    tl.store(row + 6, tl.maximum(-least, most))
    tl.store(row + 7, tl.sum(sums))
    tl.store(row + 8, tl.sum(squares))
    tl.store(row + _HEAD + exponents, bins.to(tl.float64))


@triton.jit(do_not_specialize=["row", "count"])
def _merged_row(parts, row, count: tl.int64, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float64)
    least = tl.full([COLUMNS], float("inf"), tl.float64)
    most = tl.full([COLUMNS], float("-inf"), tl.float64)
    for first in range(0, count, ROWS):
        part = first + tl.arange(0, ROWS)
        kept = (part < count)[:, None] & (column < _VALUES)[None, :]
        read = tl.load(parts + part[:, None] * _VALUES + column[None, :], mask=kept, other=0.0)
        total += tl.sum(read, axis=0)
        least = tl.minimum(least, tl.min(tl.where(kept, read, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(kept, read, float("-inf")), axis=0))
    ends = tl.where(column == 4, least, most)
    ends = tl.where(tl.abs(ends) == float("inf"), float("nan"), ends)  # no element was finite
    ends = tl.where(column == 6, tl.abs(ends), ends)
    merged = tl.where((column >= 4) & (column <= 6), ends, total)
    tl.store(row + column, merged, mask=column < _VALUES)


COMPILED = isinstance(_partial_rows, triton.JITFunction)
"""Whether launches run on the device; under TRITON_INTERPRET=1 the host computes, and waits for the device to do so."""
