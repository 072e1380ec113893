"""The classes of blocks with equal scales. The largest magnitude of a block decides its class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capd.analyze.grids import grid_of
from capd_client.formats.encoding import scaling_of
from capd_client.formats.scaled import BlockScales
from capd_client.formats.spec import Spec

__all__ = ["ScaleClasses", "values_of"]

Whole = NDArray[np.int64]


class ScaleClasses(NamedTuple):
    """The scales that the blocks of one tensor may have in a format.

    Patterns are the bits of magnitudes, whose order is that of the values.

    Attributes:
        amax: int64 [patterns], the patterns that occur in the tensor, ascending. One of them is a block's maximum.
        scales: The scales of a block with that maximum, [patterns, 1].
        of_amax: int64 [patterns], the class of that block.
        first: int64 [classes], one pattern of `amax` in each class, by its index.
        low: int64 [classes], the smallest pattern that may not become zero. It is 0 in a class whose zeros are lost.
        high: int64 [classes], the largest pattern that a block of the class may have.
    """

    amax: Whole
    scales: BlockScales
    of_amax: Whole
    first: Whole
    low: Whole
    high: Whole

    @classmethod
    def of(cls, amax: Whole, dtype: torch.dtype, spec: Spec) -> ScaleClasses:
        """Find the classes of a tensor of a 16-bit dtype that has the patterns `amax`, in a format with blocks."""
        values = values_of(amax, dtype)
        scales = scaling_of(values, spec).of(values[:, None])
        bits = torch.cat([scales.before, scales.after], 1).view(torch.int32).numpy()
        # Scales grow with the maximum, so that equal ones are neighbours.
        is_first = np.concatenate([[True], (bits[1:] != bits[:-1]).any(1)])
        first, of_amax = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        high = amax[np.append(first[1:], amax.size) - 1]
        return cls(amax, scales, of_amax, first, _lowest(scales, first, dtype, spec), high)


def values_of(patterns: Whole, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of bit patterns of a 16-bit dtype, float32."""
    return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(dtype).to(torch.float32)


def _lowest(scales: BlockScales, first: Whole, dtype: torch.dtype, spec: Spec) -> Whole:
    """Return the smallest pattern of each class that may not become zero, or may not count as flushed."""
    grid = grid_of(spec.fmt, spec.elem)
    before, after = (
        of.ravel()[torch.from_numpy(first)].to(torch.float64) for of in (scales.before, scales.after)
    )
    limit = torch.minimum(grid.smallest / 2 / before, grid.normal * after)
    # The conversion rounds to nearest, so the pattern before is certainly below the limit.
    below = limit.to(dtype).view(torch.int16).to(torch.int64) - 1
    return torch.where(limit.isnan(), 0, below.clamp(min=1)).numpy()
