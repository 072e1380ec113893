"""The numbers of an entry of dump.json: Max, Min, Mean and Norm, in float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAMES", "entry_numbers"]

NAMES = ("Max", "Min", "Mean", "Norm")
_BLOCK = 1 << 18


# Inf - Inf is NaN in msprobe, too.
@np.errstate(invalid="ignore", over="ignore")
def entry_numbers(values: NDArray[np.generic]) -> dict[str, float | bool | None]:
    """Return Max, Min, Mean and Norm (the root of the sum of squares) of a tensor's values.

    Args:
        values: The numbers, of any shape. Booleans have only Max and Min, as in msprobe; an empty tensor has None.
    """
    flat = values.reshape(-1)
    if flat.size == 0:
        return dict.fromkeys(NAMES)
    if flat.dtype == np.bool_:
        return {"Max": bool(flat.max()), "Min": bool(flat.min()), "Mean": None, "Norm": None}
    blocks = [flat[at : at + _BLOCK].astype(np.float64) for at in range(0, flat.size, _BLOCK)]
    largest = float(np.max([block.max() for block in blocks]))
    smallest = float(np.min([block.min() for block in blocks]))
    mean = math.fsum(float(block.sum()) for block in blocks) / flat.size if _all_finite(blocks) else None
    # Squares of large float64 values would overflow.
    scale = max(abs(largest), abs(smallest))
    scaled = scale if 0 < scale < math.inf else 1.0
    squares = float(sum(float(np.square(block / scaled).sum()) for block in blocks))
    return {
        "Max": largest,
        "Min": smallest,
        "Mean": float(np.sum([block.sum() for block in blocks])) / flat.size if mean is None else mean,
        "Norm": scaled * math.sqrt(squares),
    }


def _all_finite(blocks: list[NDArray[np.float64]]) -> bool:
    return all(bool(np.isfinite(block).all()) and bool(np.isfinite(block.sum())) for block in blocks)
