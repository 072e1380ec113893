"""The sums of a metric over tensors. They merge without rounding, over records, layers, ranks and steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray

from capd.analyze.error_sums import Errors
from capd.analyze.exact import ShortSum

if TYPE_CHECKING:
    from typing import Self

    import torch

__all__ = ["Floats", "Largest", "Number", "Problems", "TrendSums", "finite_pieces", "mean_of", "share_of_all"]

Floats = NDArray[np.float64]
Number = Union[int, float, None]
Problems = list[str]
"""The reasons why a tensor has no number, or none in some formats."""
_PIECE = 1 << 17


@dataclass(slots=True)
class Largest:
    """The largest of some numbers, 0 without any."""

    value: float = 0.0


@dataclass(slots=True)
class TrendSums(ABC):
    """The sums of one metric: counts, sums without rounding, histograms, maxima, and sums of other metrics.

    `add` is exactly associative and commutative. What is rounded is each record's own part, before it is added. Not
    thread-safe.
    """

    def add(self, other: Self) -> None:
        """Add the sums of other tensors."""
        for one in fields(self):
            own, more = getattr(self, one.name), getattr(other, one.name)
            if isinstance(own, int):
                setattr(self, one.name, own + more)
            else:
                _merge(own, more)

    @abstractmethod
    def numbers(self) -> dict[str, Number]:
        """Return the numbers that follow from the sums, None where one would divide by 0."""

    def details(self) -> dict[str, dict[str, int]]:
        """Return histograms, by their names and the text of each value."""
        return {}


def _merge(own: Any, more: Any) -> None:
    if isinstance(own, ShortSum):
        own.extend(more)
    elif isinstance(own, Counter):
        own.update(more)
    elif isinstance(own, Largest):
        own.value = max(own.value, more.value)
    else:
        merged: TrendSums | Errors = own
        merged.add(more)


def mean_of(total: ShortSum, count: int) -> float | None:
    """Return total / count, None without any."""
    return total.value / count if count else None


def share_of_all(part: float, whole: float) -> float | None:
    """Return 100 * part / whole, None if the whole is 0."""
    return 100 * part / whole if whole else None


def finite_pieces(values: torch.Tensor) -> Iterator[Floats]:
    """Yield the finite values of a tensor as float64, piece by piece. float64 is rounded to float32 before.

    Rounding makes an Inf of a value beyond float32, as in the formats, so it is left out.
    """
    import torch

    flat = values.detach().reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].to(torch.float32).numpy()
        yield piece[np.isfinite(piece)].astype(np.float64)
