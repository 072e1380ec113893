"""The best-fit factor between two tensors, and the sizes of a layout that it equals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fit", "explanations", "fit", "relative_error"]

_CLOSE = 1e-3
# A product of more sizes fits too much by chance.
_MOST_SIZES = 3

Values = NDArray[Any]


class Fit(NamedTuple):
    """How one tensor relates to a reference.

    Attributes:
        error: ‖b - a‖ / ‖a‖ in the Frobenius norm, where a is the reference; inf if only one of them is finite or 0.
        factor: α = ⟨b, a⟩ / ⟨a, a⟩, the least-squares fit of b by α a; None without a finite one.
        residual: ‖b - α a‖ / ‖α a‖; None without a factor, or if it is 0.
    """

    error: float
    factor: float | None
    residual: float | None


def relative_error(found: Values, reference: Values) -> float:
    """Return the Frobenius norm of the difference, relative to that of the reference; inf at a NaN or Inf."""
    a, b = _flat(reference), _flat(found)
    return _relative(b - a, a)


def fit(found: Values, reference: Values) -> Fit:
    """Compare a tensor with a reference of the same shape, in float64."""
    a, b = _flat(reference), _flat(found)
    error = _relative(b - a, a)
    square = float(a @ a)
    if not (math.isfinite(square) and square > 0 and bool(np.isfinite(b).all())):
        return Fit(error, None, None)
    factor = float(b @ a) / square
    if factor == 0.0:
        return Fit(error, 0.0, None)
    scaled = factor * a
    return Fit(error, factor, _relative(b - scaled, scaled))


def explanations(factor: float, sizes: Mapping[str, int]) -> list[str]:
    """Return the sizes of a layout that a factor equals within 1e-3, by name, such as `tp_size` or `1/cp_size`.

    Products of two and three sizes are looked at only if no single size fits.

    Args:
        factor: The factor.
        sizes: The sizes of the layout; those of 1 explain nothing.
    """
    if not math.isfinite(factor) or factor <= 0 or abs(factor - 1) < _CLOSE:
        return []
    known = {name: size for name, size in sizes.items() if size > 1}
    for count in range(1, _MOST_SIZES + 1):
        found = []
        for names in combinations(known, count):
            product = math.prod(known[name] for name in names)
            text = "·".join(names)
            if abs(factor / product - 1) < _CLOSE:
                found.append(text)
            elif abs(factor * product - 1) < _CLOSE:
                found.append(f"1/{text}" if count == 1 else f"1/({text})")
        if found:
            return found
    return []


def _flat(values: Values) -> NDArray[np.float64]:
    return np.asarray(values).reshape(-1).astype(np.float64)


def _relative(difference: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    over, under = float(np.linalg.norm(difference)), float(np.linalg.norm(reference))
    if over == 0.0:
        return 0.0
    return over / under if under > 0 and math.isfinite(over) and math.isfinite(under) else math.inf
