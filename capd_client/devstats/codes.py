"""Computes rows of 8- and 16-bit dtypes on the CPU: one histogram of the bit patterns, and the rest from a table.

It reads the tensor once and does no arithmetic on its elements. On the CPU this is the fastest method, and it is exact.
"""

from __future__ import annotations

from functools import cache

import torch

from capd_client.devstats.formulas import exponent_bins
from capd_client.devstats.tables import values_of_codes
from capd_client.protocol.statistics_row import BINS, EXPONENT_BINS, ROW_FIELDS

__all__ = ["fill_from_codes", "has_codes"]

# Elements counted at once.
_BLOCK = 1 << 19
# For fewer elements of a 16-bit dtype, handling 65,536 codes costs more than the elements.
_MIN_WORDS = 1 << 19


def has_codes(flat: torch.Tensor) -> bool:
    """Whether this tensor takes the histogram of bit patterns."""
    nbytes = flat.dtype.itemsize
    return flat.is_cpu and (nbytes == 1 or (nbytes == 2 and flat.numel() >= _MIN_WORDS))


def fill_from_codes(flat: torch.Tensor, row: torch.Tensor) -> None:
    """Write the row of a CPU tensor [n] of an 8- or 16-bit dtype."""
    table, bins = _table(flat.dtype)
    histogram = _histogram(flat, len(table))
    used = histogram.nonzero().squeeze(-1)
    values = table[used]
    weights = histogram[used].to(torch.float64)[:, None].expand_as(values)
    finite, nan = values.isfinite(), values.isnan()
    head, exponents, powers = row[: len(ROW_FIELDS)], row[BINS], row[BINS.stop :]
    exponents.copy_(torch.bincount(bins[used].flatten(), weights=weights.flatten(), minlength=EXPONENT_BINS))
    head[0] = weights.sum()
    head[1] = weights[nan].sum()
    head[2] = weights[~(finite | nan)].sum()
    head[3] = weights[values == 0].sum()
    values, weights = values[finite], weights[finite]
    if values.numel():
        head[4], head[5] = torch.aminmax(values)
        head[6] = values.abs().amax()
    else:
        head[4:7] = torch.nan
    weighted = values * weights
    head[7] = weighted.sum()
    head[8] = weighted.mul_(values).sum()
    powers[0] = weighted.mul_(values).sum()
    powers[1] = weighted.mul_(values).sum()


@cache
def _table(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 values and exponent bins by unsigned code: [codes, values in one element]."""
    values = values_of_codes(dtype, torch.device("cpu"))
    return values.to(torch.float64), exponent_bins(values)


def _histogram(flat: torch.Tensor, codes: int) -> torch.Tensor:
    """Count how often each bit pattern occurs: int64 [codes]."""
    words = flat.view(torch.uint8 if codes == 256 else torch.int16)
    histogram = torch.zeros(codes, dtype=torch.int64, device=flat.device)
    for block in torch.split(words, _BLOCK):
        if codes > 256:
            block = block.to(torch.int32).bitwise_and_(0xFFFF)
        histogram += torch.bincount(block, minlength=codes)
    return histogram
