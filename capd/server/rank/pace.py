"""The pace of a run: how fast its iterations begin, and so the first one at which all ranks can follow a change.

The ranks of one job are in step, but a message reaches each of them at its own time. Suppose that a change names an
iteration that some rank has already begun. This rank would then apply it one iteration later than the others.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

__all__ = ["LEAD_S", "MAX_AHEAD", "Pace", "leading"]

# The time until the last rank knows an order: the daemon's clock, the ranks' idle tick, a busy machine.
LEAD_S = 0.5
# A rank may be this many iterations ahead of the others and still lead them.
MAX_AHEAD = 1000
_LOOKS = 9
# Iterations that begin faster are a jump (set_moment), not steps.
_FASTEST_STEP_S = 5e-4


def leading(begun: Iterable[int]) -> int:
    """Return the iterations that the leading rank has begun, from the counts of all ranks; 0 before the first.

    A rank more than MAX_AHEAD ahead of at least half of the ranks leads nobody: its count is wrong, or it counts in
    another way. It follows a change at its own next iteration.
    """
    counts = sorted(count for count in begun if count)
    if not counts:
        return 0
    usual = counts[(len(counts) - 1) // 2]
    return max(count for count in counts if count <= usual + MAX_AHEAD)


class Pace:
    """The times at which the leading rank had begun further iterations. Not thread-safe."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)

    def look(self, begun: int, now: float) -> None:
        """Note the iterations that the leading rank has begun at `now` (monotonic seconds), 0 before the first."""
        if not begun:
            return
        if self._looks:
            then, before = self._looks[-1]
            if begun == before:
                return
            if begun < before or now - then < (begun - before) * _FASTEST_STEP_S:
                self._looks.clear()
        self._looks.append((now, begun))

    def step_s(self) -> float | None:
        """Return the seconds from one iteration to the next, the median over the last looks; None if not known."""
        steps = [(now - then) / (begun - before) for (then, before), (now, begun) in pairwise(self._looks)]
        return statistics.median(steps) if steps else None

    def next_iteration(self, begun: int, now: float) -> int:
        """Return the first iteration that no rank will have begun at `now` + LEAD_S, when all ranks know the order."""
        self.look(begun, now)
        step_s = self.step_s()
        if step_s is None:
            return begun
        # A step that takes longer than usual may end at any moment.
        into_step_s = min(now - self._looks[-1][0], step_s)
        return begun + int((into_step_s + LEAD_S) / step_s)
