"""The range of the values of one block, which the block's scale must cover, whatever the format."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.blocks import Histogram, histogram_of

if TYPE_CHECKING:
    import torch

    from capd_client.formats.spec import Block

__all__ = ["RANGE_BLOCKS", "BlockRanges", "block_ranges"]

RANGE_BLOCKS: dict[str, tuple[int | tuple[int, int], int]] = {
    "1x32": (32, -1),
    "32x1": (32, -2),
    "32x32": ((32, 32), -1),
}
"""The rows and columns of a block over the last two axes: along the last axis, along the one before it, and tiles."""


@dataclass(slots=True)
class BlockRanges:
    """Counts over blocks. `add` is exact in any order. Not thread-safe.

    Attributes:
        count: All blocks.
        empty: The blocks without a finite non-zero value.
        amax: The number of blocks for each floor(log2(max|x|)).
        ranges: The number of blocks for each floor(log2(max|x| / min|x|)) over the non-zero values.
        widest: The largest log2(max|x| / min|x|), TransformerEngine's "max blockwise dynamic range".
    """

    count: int = 0
    empty: int = 0
    amax: Histogram = field(default_factory=Counter)
    ranges: Histogram = field(default_factory=Counter)
    widest: float = 0.0

    def add(self, other: BlockRanges) -> None:
        """Add other blocks of the same size."""
        self.count += other.count
        self.empty += other.empty
        self.widest = max(self.widest, other.widest)
        self.amax.update(other.amax)
        self.ranges.update(other.ranges)


def block_ranges(values: torch.Tensor, block: Block, axis: int) -> BlockRanges | None:
    """Return the ranges of the blocks of one tensor along an axis, NaN and Inf left out. Imports torch.

    The tensor is of bfloat16, float16, float32 or float64, which is rounded to float32. The result is None if it has
    fewer than two dimensions, unless its blocks are along the last axis.
    """
    from capd_client.formats.blocks import Layout, pieces, slabs

    if values.ndim < (1 if axis == -1 and isinstance(block, int) else 2):
        return None
    found = BlockRanges()
    for slab in slabs(values.detach(), Layout(values.shape, axis, block)):
        rows = Layout(slab.shape, axis, block).rows(slab)
        for piece in pieces(rows):
            _add(found, rows[piece].float().abs())
    return found


def _add(found: BlockRanges, magnitude: torch.Tensor) -> None:
    magnitude[~magnitude.isfinite()] = 0.0
    largest = magnitude.amax(-1).numpy()
    smallest = magnitude.masked_fill_(magnitude == 0, math.inf).amin(-1).numpy()
    some = largest > 0
    high, low = np.log2(largest[some].astype(np.float64)), np.log2(smallest[some].astype(np.float64))
    found.count += len(largest)
    found.empty += int(len(largest) - len(high))
    if high.size:
        found.widest = max(found.widest, float((high - low).max()))
        found.amax.update(histogram_of(np.floor(high)))
        found.ranges.update(histogram_of(np.floor(high - low)))
