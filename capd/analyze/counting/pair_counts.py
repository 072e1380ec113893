"""Counts how often a bit pattern occurs under a scale, in one pass over the blocks of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from capd.analyze.counting.scale_classes import ScaleClasses, Whole
from capd_client.formats.blocks import Layout, pieces, slabs

__all__ = ["MAGNITUDES", "PairBins", "count_pairs"]

MAGNITUDES = 1 << 15
"""The number of bit patterns of magnitudes."""


class PairBins(NamedTuple):
    """The bins in which pairs of a class of blocks and a pattern are counted.

    Each class has a bin for each pattern from `low` to `high`, after one for all smaller patterns.

    Attributes:
        of_amax: int32 [32768], the class of a block by the pattern of its maximum.
        low, high: As in `ScaleClasses`.
        start: int64 [classes], the bin of the pattern `low`.
        size: The number of bins.
    """

    of_amax: torch.Tensor
    low: Whole
    high: Whole
    start: Whole
    size: int

    @classmethod
    def of(cls, together: Sequence[ScaleClasses]) -> PairBins:
        """Make the bins for formats that divide the blocks into the same classes."""
        one = together[0]
        of_amax = np.zeros(MAGNITUDES, np.int32)
        of_amax[one.amax] = one.of_amax
        low = np.min([each.low for each in together], axis=0)
        widths = np.maximum(one.high - low + 1, 0) + 1
        ends = np.cumsum(widths)
        return cls(torch.from_numpy(of_amax), low, one.high, ends - widths + 1, int(ends[-1]))

    def pairs(self, counts: Whole) -> tuple[Whole, Whole, Whole]:
        """Return the class, the pattern and the count of each pair that occurs with a pattern from `low` on."""
        used = np.flatnonzero(counts)
        classes = np.searchsorted(self.start - 1, used, side="right") - 1
        patterns = used - self.start[classes] + self.low[classes]
        kept = patterns >= self.low[classes]
        return classes[kept], patterns[kept], counts[used[kept]]


def count_pairs(
    values: torch.Tensor, layout: Layout, several: Sequence[PairBins]
) -> tuple[Whole, list[Whole]]:
    """Count the blocks of a 16-bit tensor by the pattern of their maximum, and the pairs in all bins.

    Returns:
        int64 [32768], the number of blocks for each pattern, and int64 [size] for each of `several`.
    """
    tables = [_tables(bins) for bins in several]
    counts = [torch.zeros(bins.size, dtype=torch.int64) for bins in several]
    maxima: list[torch.Tensor] = []
    for rows in _magnitudes(values, layout):
        amax = rows.amax(-1)
        maxima.append(amax)
        wide = rows.to(torch.int32)
        for bins, (least, shift), total in zip(several, tables, counts, strict=True):
            classes = bins.of_amax[amax.to(torch.int32)]
            found = torch.maximum(wide, least[classes]).add_(shift[classes])
            total += torch.bincount(found.view(-1), minlength=bins.size)
    blocks = np.bincount(torch.cat(maxima).numpy(), minlength=MAGNITUDES)
    return blocks, [total.numpy() for total in counts]


def _tables(bins: PairBins) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pattern before `low`, and what makes a pattern its bin, by class; int32 [classes, 1]."""
    least, shift = bins.low - 1, bins.start - bins.low
    return torch.from_numpy(least.astype(np.int32))[:, None], torch.from_numpy(shift.astype(np.int32))[
        :, None
    ]


def _magnitudes(values: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    """Yield the patterns of magnitudes, int16 [blocks, values of a block]; zeros fill an incomplete block."""
    for slab in slabs(values.view(torch.int16), layout):
        rows = Layout(slab.shape, layout.axis, layout.block).rows(slab)
        for piece in pieces(rows):
            yield rows[piece] & (MAGNITUDES - 1)
