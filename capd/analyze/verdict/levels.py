"""The distribution of a format's SQNR over the tensors of a role, or over the calls of a product.

Scales differ from tensor to tensor, so a sum over tensors is decided by the loudest of them. A distribution counts each
tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ENOUGH_DB", "POOR_DB", "Levels", "levels_of"]

ENOUGH_DB = 50.0
"""The SQNR of bfloat16's own rounding. More than this counts as this, because training does not need it."""
POOR_DB = 10.0
"""The noise has a tenth of the signal's energy. Below this, a tensor is not kept."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The SQNR of some tensors in one format.

    Attributes:
        tensors: Their number.
        median_db: The SQNR that at least half of the tensors reach.
        tenth_db: The SQNR that at least nine of ten tensors reach; of fewer than ten, all.
        error_db: The standard error of `tenth_db`: 0 if all records were read, None if nothing is known of it.
        poor: The number of tensors below POOR_DB.
    """

    tensors: int
    median_db: float
    tenth_db: float
    error_db: float | None = 0.0
    poor: int = 0

    @property
    def merit_db(self) -> float:
        """`tenth_db`, at most ENOUGH_DB and at least 0."""
        return _within(self.tenth_db)


def levels_of(values: Sequence[float], errors: Sequence[float | None] = ()) -> Levels | None:
    """Return the distribution of SQNRs, None without any.

    Args:
        values: The SQNR of each tensor in dB.
        errors: The standard error of each, 0 for a tensor that was read whole, None if it is not known. Without errors
            all tensors were read whole.
    """
    if not values:
        return None
    ordered = sorted(values)
    return Levels(
        tensors=len(ordered),
        median_db=ordered[(len(ordered) - 1) // 2],
        tenth_db=ordered[len(ordered) // 10],
        error_db=_error(ordered, errors) if any(one != 0 for one in errors) else 0.0,
        poor=sum(value < POOR_DB for value in ordered),
    )


def _error(ordered: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """Return the standard error of the worst tenth.

    It has two parts: that of a quantile of so many tensors, from the distance of the quantiles one standard error below
    and above it, and the error of a single tensor. So it is rather too large. Source: Serfling, Approximation Theorems
    of Mathematical Statistics, section 2.6.
    """
    number, known = len(ordered), [one for one in errors if one is not None]
    if not known and number < _FEW:
        return None
    apart = math.sqrt(0.1 * 0.9 / number)
    low, high = (_within(ordered[_place(share, number)]) for share in (0.1 - apart, 0.1 + apart))
    of_one = sum(one * one for one in known) / len(known) if known else 0.0
    return math.sqrt(((high - low) / 2) ** 2 + of_one)


# Fewer tensors say nothing of a quantile.
_FEW = 3


def _place(share: float, number: int) -> int:
    return min(number - 1, max(0, math.floor(share * number)))


def _within(level: float) -> float:
    return min(ENOUGH_DB, max(0.0, level))
