"""Names the factor by which a product is off: a product of the sizes of the run's layout."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import prod

__all__ = ["FIT", "factor_names"]

FIT = 1e-3
"""The largest relative distance of a factor from a product of sizes that bears its name."""
_MOST_TOGETHER = 2


def factor_names(alpha: float, sizes: Mapping[str, int]) -> list[str]:
    """Return what α or 1/α is, such as "tp_size" or "1/(dp_size · micro_batches)", the simplest first.

    Args:
        alpha: The factor.
        sizes: The sizes by name.
    """
    known = {name: size for name, size in sizes.items() if size > 1}
    found = []
    for count in range(1, _MOST_TOGETHER + 1):
        for names in combinations(known, count):
            size = prod(known[name] for name in names)
            text = " · ".join(names)
            if abs(alpha / size - 1) <= FIT:
                found.append(text)
            elif abs(alpha * size - 1) <= FIT:
                found.append(f"1/{text}" if count == 1 else f"1/({text})")
        if found:
            break
    return found
