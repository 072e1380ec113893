"""The budget of a step: the bytes that all captures of one iteration may take (`max_mb_per_step`)."""

from __future__ import annotations

from typing import Optional

__all__ = ["StepBudget"]

# Iterations that are counted at the same time: a backward pass may still belong to an earlier iteration.
_ITERATIONS = 8


class StepBudget:
    """The bytes taken per iteration, with one limit. Not thread-safe.

    Captures are taken in the order of their arrival, if they fit. After one that did not fit, a smaller one may fit.
    `nbytes` None means no limit.
    """

    def __init__(self, nbytes: Optional[int]) -> None:
        self.nbytes = nbytes
        self._taken: dict[int, int] = {}

    def has_room(self, iteration: int, nbytes: int) -> bool:
        """Return whether `nbytes` more of this iteration fit."""
        return self.nbytes is None or self._taken.get(iteration, 0) + nbytes <= self.nbytes

    def take(self, iteration: int, nbytes: int) -> None:
        """Count a capture."""
        if self.nbytes is None:
            return
        taken = self._taken
        if iteration not in taken and len(taken) >= _ITERATIONS:
            # The iteration that began first.
            del taken[next(iter(taken))]
        taken[iteration] = taken.get(iteration, 0) + nbytes

    def give(self, iteration: int, nbytes: int) -> None:
        """Return `nbytes` that will not be sent."""
        if iteration in self._taken:
            self._taken[iteration] -= nbytes
