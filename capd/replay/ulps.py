"""The distance of a captured product from a replayed one in the same dtype: equal bits, and steps between values."""

from __future__ import annotations

import torch
from torch import Tensor

from capd.replay.sums import CapturedDistance

__all__ = ["DTYPES", "captured_distance"]

_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
DTYPES = frozenset(_INTEGERS)
"""The dtypes whose values are compared. The steps between two values of float64 are beyond the integers of torch."""
_BLOCK_VALUES = 1 << 20


def captured_distance(replayed: Tensor, captured: Tensor) -> CapturedDistance:
    """Return the distance of two tensors of one dtype of `DTYPES` and one shape.

    0 and -0 are one step apart.
    """
    found = CapturedDistance(calls=1, values=captured.numel())
    mine, theirs = replayed.reshape(-1), captured.reshape(-1)
    for first in range(0, found.values, _BLOCK_VALUES):
        a, b = (one[first : first + _BLOCK_VALUES] for one in (mine, theirs))
        ours, bits = (one.view(_INTEGERS[one.dtype]) for one in (a, b))
        different = ours != bits
        count = int(different.sum())
        found.equal += a.numel() - count
        if count:
            is_finite = (a.isfinite() & b.isfinite())[different]
            found.nonfinite += count - int(is_finite.sum())
            steps = (_ordered(ours[different]) - _ordered(bits[different]))[is_finite]
            found.max_ulp = max(found.max_ulp, int(steps.abs().max()) if steps.numel() else 0)
    return found


def _ordered(bits: Tensor) -> Tensor:
    """Return integers in the order of the values: those of negative values count down from -1."""
    least = torch.iinfo(bits.dtype).min
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, least - 1 - wide, wide)
