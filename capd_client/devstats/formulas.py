"""Computes rows by torch's own operations, block by block: on any device, without a compiler, without a wait.

Sums accumulate in float64. Squares of float32 and smaller are exact there, so nothing overflows before it is added. On
a device every result stays a tensor (`blind`). On the CPU reading a result costs nothing, so a block without NaN, Inf
or zeros skips their steps.
"""

from __future__ import annotations

import math
from typing import Optional

import torch

from capd_client.devstats.tables import values_of_codes
from capd_client.protocol.statistics_row import EXPONENT_BINS, POWER_SUMS, ROW_FIELDS

__all__ = ["exponent_bins", "fill_from_values"]

# Elements at once. The CPU's working set stays in its cache. A device needs the length, and about 40 MB for it.
_BLOCK, _BLIND_BLOCK = 1 << 16, 1 << 20
# Copies of the bins on a device, so that its atomic additions rarely collide.
_LANES = 128


def fill_from_values(flat: torch.Tensor, row: torch.Tensor, *, blind: bool) -> None:
    """Write the row of a tensor [n] of any dtype in `ROW_DTYPES`.

    blind: The host reads no result, because it would have to wait for the device.
    """
    fields = torch.split(row, [1] * len(ROW_FIELDS) + [EXPONENT_BINS] + [1] * len(POWER_SUMS))
    _, nan, inf, _, low, high, absmax, _, _, bins, _, _ = fields
    row.zero_()
    low.fill_(math.inf)
    high.fill_(-math.inf)
    table = values_of_codes(flat.dtype, flat.device) if flat.dtype.itemsize == 1 else None
    for block in torch.split(flat, _BLIND_BLOCK if blind else _BLOCK):
        if block.numel():
            _add(_values(block, table), fields, blind)
    absmax.copy_(torch.maximum(low.abs(), high.abs()))
    inf.copy_(bins[-1:]).sub_(nan)
    ends = row[4:7]
    # Infinite ends mean that no element was finite.
    ends.masked_fill_(ends.isinf(), math.nan)


def exponent_bins(values: torch.Tensor, blind: bool = False) -> torch.Tensor:
    """Return the biased exponent of each value as float32, int32; finite float64 beyond float32 falls into 254."""
    words = values.to(torch.float32).view(torch.int32)
    bins = words.bitwise_right_shift(23).bitwise_and_(255)
    if values.dtype is torch.float64 and (blind or bins.amax() == 255):
        bins.masked_fill_((bins == 255).logical_and_(values.isfinite()), 254)
    return bins


def _values(block: torch.Tensor, table: Optional[torch.Tensor]) -> torch.Tensor:
    """Return the numbers in a dtype that every operation supports, [m]; `table` holds the values of an 8-bit dtype."""
    dtype = block.dtype
    if table is not None:
        return table[block.view(torch.uint8).to(torch.int32)].flatten()
    if dtype in (torch.float16, torch.bfloat16):
        return block.to(torch.float32)
    # Few operations support unsigned words.
    if dtype is getattr(torch, "uint16", None):
        return block.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    if dtype is getattr(torch, "uint32", None):
        return block.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    return block


def _add(values: torch.Tensor, fields: tuple[torch.Tensor, ...], blind: bool) -> None:
    """Add a block of values to the fields of a row."""
    count, nan, _, zero, low, high, _, total, squares, bins, cubes, fourths = fields
    exponents = exponent_bins(values, blind)
    counts = _counted(exponents) if blind else torch.bincount(exponents, minlength=EXPONENT_BINS)
    count.add_(values.numel())
    bins.add_(counts)
    if blind or counts[0]:
        zero.add_(values.numel()).sub_(values.count_nonzero())
    if blind or counts[255]:
        nan.add_(values.isnan().sum())
        least = values.nan_to_num(math.inf, math.inf, math.inf).amin()
        most = values.nan_to_num(-math.inf, -math.inf, -math.inf).amax()
        values = values.nan_to_num(0.0, 0.0, 0.0)
    else:
        least, most = torch.aminmax(values)
    low.copy_(torch.minimum(low, least))
    high.copy_(torch.maximum(high, most))
    wide = values.to(torch.float64)
    total.add_(wide.sum())
    square = wide.square()
    squares.add_(square.sum())
    # `wide` may be the tensor itself.
    cubes.add_((wide * square).sum())
    fourths.add_(square.mul_(square).sum())


def _counted(bins: torch.Tensor) -> torch.Tensor:
    """Count how often each exponent occurs, int64 [256]. `bincount` would make the host wait for the largest bin.

    Sums of whole numbers do not depend on the order. Under deterministic algorithms torch still sorts the scatter's
    64-bit indices, and other methods, such as `histc`, raise. Sorting one byte per value costs a fraction of that.
    """
    if torch.are_deterministic_algorithms_enabled():
        return _sorted_counts(bins)
    n, device = bins.numel(), bins.device
    lanes = torch.arange(n, device=device).bitwise_and_(_LANES - 1).mul_(EXPONENT_BINS).add_(bins)
    counts = torch.zeros(_LANES * EXPONENT_BINS, dtype=torch.int32, device=device)
    ones = torch.ones(1, dtype=torch.int32, device=device).expand(n)
    return counts.scatter_add_(0, lanes, ones).view(_LANES, EXPONENT_BINS).sum(0)


def _sorted_counts(bins: torch.Tensor) -> torch.Tensor:
    ordered = bins.to(torch.uint8).sort().values
    each = torch.arange(EXPONENT_BINS, dtype=torch.int32, device=bins.device).to(torch.uint8)
    up_to = torch.searchsorted(ordered, each, right=True)
    counts = up_to.clone()
    counts[1:].sub_(up_to[:-1])
    return counts
