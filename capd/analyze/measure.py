"""Measures the error of a format on one tensor, by the histogram of its bit patterns or piece by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from capd.analyze.blocks import BlockStatistics, histogram_of, sqnr_histogram
from capd.analyze.counting.counted_blocks import CountedBlocks, counted_blocks
from capd.analyze.distribution import Distribution, distribution_of
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.grids import Grid, grid_of, grids
from capd_client.formats.elements import Element, quantise
from capd_client.formats.encoding import QuantisedPiece, quantised_pieces
from capd_client.formats.spec import FORMATS, FormatError, Spec

__all__ = ["at_scale", "errors_of", "measure_each", "measured_patterns"]

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# A number of values. Below it, counting 65,536 patterns costs more than the values themselves.
_FEW = 1 << 13
# An exact scale is rounded to float32, and this must not count as saturation.
_ROUNDING = 1 + 2.0**-21
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def _is_blockless(spec: Spec) -> bool:
    """Return whether equal values always become equal ones, so that counts of the values are enough."""
    return spec.block is None and spec.rounding != "stochastic"


def measure_each(
    values: torch.Tensor,
    distribution: Distribution,
    choices: Sequence[FormatChoice],
    *,
    per_block: bool = False,
) -> tuple[dict[str, Errors], list[str]]:
    """Measure the errors of one tensor in each format. `per_block` keeps the distribution of the blocks' SQNR, too.

    Returns:
        The errors by the format's label, and the reasons why some formats do not take the tensor.
    """
    found, problems = {}, []
    specs = {choice.label: choice.spec for choice in choices}
    # The spread over blocks needs each block's own sums.
    counted = {} if per_block else counted_blocks(values, distribution, list(specs.values()))
    for label, spec in specs.items():
        try:
            if spec in counted:
                found[label] = _measured_counts(counted[spec], values.numel(), spec)
            else:
                found[label] = _measured(values, distribution, spec, per_block)
        except FormatError as error:
            problems.append(f"{label}: {error}")
    return found, problems


def errors_of(values: torch.Tensor, choice: FormatChoice, *, per_block: bool = False) -> Errors:
    """Measure the errors of one tensor in a format. The same tensor gives the same bits, whatever the threads.

    16-bit values are measured by counts: those of their bit patterns, or with blocks those of scales and patterns.
    Their sums do not round. Other values, stochastic rounding, legacy blocks and `per_block` are measured in pieces of
    some MiB, whose float64 sums are added without rounding. "stochastic" rounding draws from its own generator,
    seeded with 0.

    Args:
        values: A tensor of bfloat16, float16, float32, or float64, which is rounded to float32 first. Any shape.
        choice: The format.
        per_block: Whether to keep the distribution of the blocks' SQNR, too.

    Returns:
        The errors of one record.

    Raises:
        FormatError: If the tensor has another dtype, or lacks the axis.
    """
    name = _NAMES.get(values.dtype)
    if name is None or values.numel() <= _FEW:
        return _measured(values, None, choice.spec, per_block)
    bits = values.detach().contiguous().view(torch.int16).numpy()
    found, problems = measure_each(
        values.detach(), distribution_of(bits, name), [choice], per_block=per_block
    )
    if problems:
        raise FormatError(problems[0])
    return found[choice.label]


def _measured(values: torch.Tensor, distribution: Distribution | None, spec: Spec, per_block: bool) -> Errors:
    if distribution is not None and values.dtype in _NAMES and _is_blockless(spec):
        return measured_patterns(distribution, spec)
    found, grid = _errors_in(spec, values.numel()), grid_of(spec.fmt, spec.elem)
    for piece in quantised_pieces(values, spec, torch.Generator().manual_seed(0)):
        x, y = _add_piece(found, piece, grid)
        if found.blocks is not None:
            _add_blocks(found.blocks, piece, grid)
            if per_block:
                _add_block_errors(found.blocks, x, y)
    return found


def _measured_counts(counted: CountedBlocks, count: int, spec: Spec) -> Errors:
    found, grid = _errors_in(spec, count), grid_of(spec.fmt, spec.elem)
    _add_piece(found, counted.values, grid, counted.counts)
    if found.blocks is not None:
        _add_blocks(found.blocks, counted.blocks, grid, counted.block_counts)
    return found


def _errors_in(spec: Spec, count: int) -> Errors:
    """Return the errors of one record of `count` values, before any is added."""
    blocks = None if spec.block is None else BlockStatistics(FORMATS[spec.fmt].scale_type)
    return Errors(1, count, blocks=blocks)


def measured_patterns(distribution: Distribution, spec: Spec) -> Errors:
    """Measure the errors of the values of a distribution, as one record, in a format without blocks.

    float32 values are rounded to bfloat16 there (see `Distribution.exact`). A tensor's scale covers all values.
    """
    found, grid = Errors(1), grid_of(spec.fmt, spec.elem)
    for values, counts in _patterns(distribution):
        found.count += int(counts.sum())
        # There is one piece, because there are few patterns.
        for piece in quantised_pieces(values, spec):
            _add_piece(found, piece, grid, counts)
    return found


def at_scale(distribution: Distribution, element: Element, scale: float) -> Errors:
    """Measure the errors of the values of a distribution under one scale.

    A value is divided by the scale, rounded onto the element's grid with ties away from zero, saturating, and
    multiplied back. All steps are in float32.
    """
    found = Errors(1)
    factor = torch.tensor(scale, dtype=torch.float32)
    for patterns, counts in _patterns(distribution):
        values = patterns.to(torch.float32)
        rounded = quantise(values / factor, values, element, "away").mul_(factor)
        found.count += int(counts.sum())
        piece = QuantisedPiece(values, rounded, after=factor)
        _add_piece(found, piece, grids()[element.name], counts)
    return found


def _patterns(distribution: Distribution) -> Iterator[tuple[torch.Tensor, Counts]]:
    """Yield the occurring magnitudes of each dtype of a distribution, and the count of each. Rounding is symmetric."""
    for dtype, codes, counts in distribution.magnitudes():
        yield torch.from_numpy(codes.view(np.int16).copy()).view(getattr(torch, dtype)), counts


# NaNs may be signalling. Products with large scales may be beyond float32.
_quiet = np.errstate(invalid="ignore", over="ignore")


@_quiet
def _add_piece(
    found: Errors, piece: QuantisedPiece, grid: Grid, counts: Counts | None = None
) -> tuple[Floats, Floats]:
    """Add single values. Return them before and after, 0 if they are not compared."""
    usable = _count(found, piece, grid, counts)
    x, y = (values.numpy().astype(np.float64) for values in (piece.values, piece.found))
    if usable is not None:
        x, y = (np.where(usable, values, 0.0) for values in (x, y))
    found.add_values(x, y, counts)
    return x, y


def _count(
    found: Errors, piece: QuantisedPiece, grid: Grid, counts: Counts | None
) -> NDArray[np.bool_] | None:
    """Count the errors of single values. Return which values are compared, None if all are."""
    x, y = piece.values.numpy(), piece.found.numpy()

    def number(which: NDArray[np.bool_]) -> int:
        return int(np.count_nonzero(which) if counts is None else counts[which].sum())

    after = np.float32(1) if piece.after is None else piece.after.numpy()
    magnitude, some = np.abs(x), x != 0
    found.underflows += number((y == 0) & some)
    smallest, largest = _limits(after, grid)
    found.flushes += number((magnitude < smallest) & some)
    finite = np.isfinite(x)
    found.saturations += number((magnitude > largest) & finite)
    usable: NDArray[np.bool_] = finite & np.isfinite(y)
    if usable.all():
        return None
    found.nan += number(np.isnan(x))
    found.inf += number(np.isinf(x))
    within = True if piece.within is None else piece.within.numpy()
    found.lost += number(finite & ~usable & within)
    return usable


def _limits(
    after: NDArray[np.float32] | np.float32, grid: Grid
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the smallest normal and the largest magnitude under scales.

    A small block's scale may round to 0. Its values are below the smallest one then, and none is beyond the largest.
    """
    smallest, largest = after * np.float32(grid.normal), after * np.float32(grid.largest * _ROUNDING)
    is_zero = after == 0
    return np.where(is_zero, np.float32(np.inf), smallest), np.where(is_zero, np.float32(np.inf), largest)


@_quiet
def _add_blocks(
    blocks: BlockStatistics, piece: QuantisedPiece, grid: Grid, counts: Counts | None = None
) -> None:
    amax, after, stored = (
        of.numpy().ravel() for of in (piece.amax, piece.after, piece.stored) if of is not None
    )
    often = np.ones(amax.size, np.int64) if counts is None else counts
    usable = np.isfinite(amax) & (amax > 0)
    blocks.count += int(often.sum())
    blocks.zero += int(often[amax == 0].sum())
    blocks.invalid += int(often[~np.isfinite(amax)].sum())
    blocks.saturated += int(often[usable & (amax > _limits(after, grid)[1])].sum())
    codes = stored[usable] if stored.dtype == np.uint8 else np.frexp(stored[usable])[1] - 1
    blocks.scales.update(histogram_of(codes, often[usable]))


def _add_block_errors(blocks: BlockStatistics, x: Floats, y: Floats) -> None:
    d = y - x
    levels, without = sqnr_histogram(np.square(x).sum(-1), np.square(d, out=d).sum(-1))
    blocks.sqnr = (blocks.sqnr or Counter()) + levels
    blocks.exact += without
