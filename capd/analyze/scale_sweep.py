"""One scale for a whole tensor, swept from the scale that fits the largest value to one that fits the smallest value.

The method is that of `mxfp_scaling_test.py` of tensor_saver's tools. There are 21 equally spaced exponents, mostly not
whole. They go from "max-align", floor(log2 max|x|) - (2^(ebits - 1) - 1), to "min-align", floor(log2(min|x| / smallest
normal value)), over the non-zero x. For each exponent, x / 2^e is rounded onto the element's grid with ties away from
zero, saturating, and multiplied back.

The score compares the exponents: .3 MSE, .3 cosine, .2 PSNR, .1 MAE and .1 relative error. Each part goes from 0 (the
worst) to 1 (the best), except the cosine, which counts unchanged. The highest score is recommended; of equal scores,
the largest scale. The script adds 1e-10 to each span, which hides the errors of small gradients. Here a span of 0
counts as 1 instead.

The sweep uses the histogram of the values: O(65,536) for an exponent, for any number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from capd.analyze.distribution import Distribution
from capd.analyze.error_sums import Errors
from capd.errors import ConfigError

__all__ = ["LEVELS", "SWEEP_ELEMENTS", "WEIGHTS", "Sweep", "elements_of", "sweep_scales"]

LEVELS = 21
SWEEP_ELEMENTS = ("e4m3", "e5m2", "e2m1")
WEIGHTS = {"mse": 0.3, "cosine": 0.3, "psnr_db": 0.2, "mae": 0.1, "relative": 0.1}
_RISING = frozenset({"cosine", "psnr_db"})


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sweep of one element format on one distribution. `errors` and `scores` have a value for each exponent."""

    element: str
    max_align: int
    min_align: int
    exponents: list[float]
    errors: list[Errors]
    scores: list[float]

    @property
    def recommended(self) -> int:
        """The index of the level with the highest score."""
        return self.scores.index(max(self.scores))

    def best(self, metric: str) -> int:
        """Return the index of the best level by one of WEIGHTS."""
        values = _filled([getattr(one, metric) for one in self.errors])
        return values.index(max(values) if metric in _RISING else min(values))


def elements_of(text: str) -> tuple[str, ...]:
    """Return the elements that `text` names: "e4m3,e5m2,e2m1". Raises ConfigError for another word. Imports torch."""
    from capd_client.formats.elements import ELEMENTS

    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in ELEMENTS:
            raise ConfigError(f"unknown element {word!r}; --sweep-scale takes {', '.join(ELEMENTS)}")
    return found


def sweep_scales(distribution: Distribution, element: str) -> Sweep | None:
    """Return the sweep of an element ("e4m3", …), None if all finite values are zero. Imports torch."""
    from capd.analyze.measure import at_scale
    from capd_client.formats.elements import ELEMENTS

    values, _ = distribution.finite()
    some = abs(values[values != 0])
    if not some.size:
        return None
    grid = ELEMENTS[element]
    top = 2 ** (grid.exponent_bits - 1) - 1
    max_align = math.floor(math.log2(float(some.max()))) - top
    min_align = math.floor(math.log2(float(some.min())) - grid.min_exponent)
    high, low = max(max_align, min_align), min(max_align, min_align)
    exponents = [high + (low - high) * level / (LEVELS - 1) for level in range(LEVELS)]
    errors = [at_scale(distribution, grid, 2.0**exponent) for exponent in exponents]
    return Sweep(element, max_align, min_align, exponents, errors, _scores(errors))


def _scores(errors: Sequence[Errors]) -> list[float]:
    total = [0.0] * len(errors)
    for metric, weight in WEIGHTS.items():
        values = _filled([getattr(one, metric) for one in errors])
        graded = values if metric == "cosine" else _graded(values, rising=metric in _RISING)
        total = [have + weight * value for have, value in zip(total, graded, strict=True)]
    return total


def _filled(values: Sequence[float | None]) -> list[float]:
    """Replace an undefined cosine by 0. It is undefined if every value became zero."""
    return [0.0 if value is None else value for value in values]


def _graded(values: Sequence[float], *, rising: bool) -> list[float]:
    """Map values to grades from 0, the worst, to 1. An infinite PSNR, without any error, is 1."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    shares = [(value - low) / span if math.isfinite(value) else 1.0 for value in values]
    return shares if rising else [1 - share for share in shares]
