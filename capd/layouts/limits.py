"""The largest error that rounding explains, for each tensor: from noise runs, or a guess from the depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from capd.errors import NothingMatched
from capd.layouts.factor import relative_error
from capd.layouts.views import Aspect
from capd.layouts.whole_run import Occasion, WholeRun

__all__ = ["Limit", "Limits", "roundoff"]

# Half the distance of neighbouring numbers at 1: 2 to the power of minus the bits of the significand.
_ROUNDOFF = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}  # fmt: skip
_FLOOR = 2


class Limit(NamedTuple):
    """The limit of one tensor.

    Attributes:
        value: The largest relative Frobenius error that is accepted.
        estimate: The error that it is a multiple of: the largest of the noise runs, or eps · √depth.
        eps: The unit roundoff of the dtype.
    """

    value: float
    estimate: float
    eps: float


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype; that of float32 for one whose numbers are exact."""
    return _ROUNDOFF.get(dtype, 2.0**-24)


class Limits:
    """The limits of all tensors.

    With noise runs, the estimate is the largest error of a tensor in one iteration over all micro-batches and noise
    runs. Without, it is eps · √depth, where depth counts the modules that were computed until then, a random walk of
    one rounding each. That is a guess.
    """

    def __init__(self, reference: WholeRun, noise: Sequence[WholeRun], times: float) -> None:
        self._reference, self._noise, self._times = reference, list(noise), times
        self._known: dict[tuple[str, int], float] = {}
        self._depths: dict[tuple[str, str], int] = {}
        for run in self._noise:
            if not any(run.has(name, at) for name in reference.names for at in reference.occasions(name)):
                raise NothingMatched(
                    f"--noise {run.source}: it has no tensor of {reference.source} at the same moment; a noise run has "
                    "the reference's layout and steps"
                )

    @property
    def are_guesses(self) -> bool:
        """Whether there is no noise run."""
        return not self._noise

    def of(self, aspect: Aspect, iteration: int, eps: float) -> Limit:
        """Return the limit of an aspect in one iteration. Raises as `LogicalSeries.numpy`."""
        place = (aspect.text, iteration)
        if place not in self._known:
            self._known[place] = self._measured(aspect, iteration)
        estimate = self._known[place]
        if self.are_guesses:
            step = (aspect.name.module, aspect.name.operation)
            estimate = eps * math.sqrt(self._depths.setdefault(step, len(self._depths) + 1))
        return Limit(max(self._times * estimate, _FLOOR * eps), estimate, eps)

    def _measured(self, aspect: Aspect, iteration: int) -> float:
        largest, cut = 0.0, aspect.reference
        for at in self._reference.occasions(cut.names[0]):
            if at.iteration != iteration:
                continue
            for run in self._noise:
                if all(run.has(name, at) for name in cut.names):
                    largest = max(largest, self._error(aspect, run, at))
        return largest

    def _error(self, aspect: Aspect, run: WholeRun, at: Occasion) -> float:
        truth, found = aspect.reference.values(self._reference, [at]), aspect.reference.values(run, [at])
        # The tokens of an expert may be others in the noise run.
        return relative_error(found, truth) if found.shape == truth.shape else 0.0
