"""How many bytes the captures of one iteration may take together (`max_mb_per_step`)."""

from __future__ import annotations

from typing import Optional

__all__ = ["StepBudget"]

_ITERATIONS = 8  # counted side by side: a backward may still belong to an iteration before


class StepBudget:
    """Bytes taken per iteration, against one limit. Not thread-safe.

    Captures are taken in the order in which they come, as long as they fit; a smaller one behind one that did not fit
    still may. `nbytes` None is no limit.
    """

    def __init__(self, nbytes: Optional[int]) -> None:
        self.nbytes = nbytes
        self._taken: dict[int, int] = {}

    def has_room(self, iteration: int, nbytes: int) -> bool:
        """Whether `nbytes` more of this iteration fit."""
        return self.nbytes is None or self._taken.get(iteration, 0) + nbytes <= self.nbytes

    def take(self, iteration: int, nbytes: int) -> None:
        """Count a capture."""
        if self.nbytes is None:
            return
        taken = self._taken
        if iteration not in taken and len(taken) >= _ITERATIONS:
            del taken[next(iter(taken))]  # the one that was begun first
        taken[iteration] = taken.get(iteration, 0) + nbytes

    def give(self, iteration: int, nbytes: int) -> None:
        """Count so much less: it will not be sent."""
        if iteration in self._taken:
            self._taken[iteration] -= nbytes
