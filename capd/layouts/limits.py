"""The largest error that rounding explains, for each tensor: from noise runs, or a guess from the products so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capd.errors import ConfigError, NothingMatched
from capd.layouts.factor import relative_error
from capd.layouts.roundings import Roundings
from capd.layouts.views import Aspect
from capd.layouts.whole_run import Occasion, WholeRun

__all__ = ["Limit", "Limits"]

_FLOOR = 2
# A factor of two between layouts is an error of 0.5 or 1, which no guess may accept.
_LARGEST_GUESS = 0.49


class Limit(NamedTuple):
    """The limit of one tensor.

    Attributes:
        value: The largest relative Frobenius error that is accepted.
        estimate: The error that it is a multiple of: the largest of the noise runs, or a guess.
        eps: The unit roundoff of the dtype.
    """

    value: float
    estimate: float
    eps: float


class Limits:
    """The limits of all tensors.

    With noise runs, the estimate is the largest error of a tensor in one iteration over all micro-batches and noise
    runs. Without, it is a guess (`Roundings`).
    """

    def __init__(self, reference: WholeRun, noise: Sequence[WholeRun], times: float, ranks: int = 1) -> None:
        """Check the noise runs.

        Args:
            reference: The reference.
            noise: Runs with its layout and perturbed inputs.
            times: The limit, in estimates.
            ranks: The most ranks over which either layout adds up the terms of one product.

        Raises:
            NothingMatched: A noise run shares no tensor with the reference.
        """
        self._reference, self._noise, self._times = reference, list(noise), times
        self._known: dict[tuple[str, int], float] = {}
        self._roundings = Roundings(reference, ranks)
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
        """Return the limit of an aspect in one iteration.

        Raises:
            ConfigError: A tensor of a noise run holds NaN or Inf, and that of the reference does not.
            CapdError: As `LogicalSeries.numpy`.
        """
        place = (aspect.text, iteration)
        if place not in self._known:
            self._known[place] = self._measured(aspect, iteration)
        estimate = self._known[place]
        if self.are_guesses:
            estimate = self._roundings.estimate(aspect.reference.names[0], iteration, eps)
        value = max(self._times * estimate, _FLOOR * eps)
        return Limit(min(value, _LARGEST_GUESS) if self.are_guesses else value, estimate, eps)

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
        if found.shape != truth.shape:
            return 0.0
        # A NaN of the reference is told where it is judged.
        if np.isfinite(truth).all() and not np.isfinite(found).all():
            raise ConfigError(
                f"--noise {run.source}: {aspect.text} at iteration {at.iteration} holds NaN or Inf, and the reference "
                "none, so it measures no limit; give another noise run"
            )
        return relative_error(found, truth)
