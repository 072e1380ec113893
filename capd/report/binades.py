"""The shares of values by binary exponent, in few bytes, so that each drawn record of each series can have them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

__all__ = ["WHOLE", "binades", "exponent_counts"]

WHOLE = 10_000
"""The sum of all shares, before they are rounded."""
_BIAS, _NONFINITE_BIN = 127, 255


def exponent_counts(histogram: Mapping[int, int]) -> list[int]:
    """Return the first exponent e, then the number of values 2^e ≤ |x| < 2^(e+1) from e on. Empty without values.

    `histogram` counts values by the exponent's bits of float32 (`Stats.exponent_histogram`).
    """
    present = [bin_ for bin_ in histogram if 0 < bin_ < _NONFINITE_BIN]
    if not present:
        return []
    first, last = min(present), max(present)
    return [first - _BIAS, *(histogram.get(bin_, 0) for bin_ in range(first, last + 1))]


def binades(histogram: Mapping[int, int]) -> array[int]:
    """Return the same with shares of WHOLE for counts, as int16. A binade with a value has a share of 1 at least."""
    first, *counts = exponent_counts(histogram) or [0]
    total = sum(counts)
    return array(
        "h", [first, *(max(round(WHOLE * one / total), one > 0) for one in counts)] if counts else []
    )
