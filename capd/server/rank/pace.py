"""How fast a run's iterations begin, and so from which one on every rank can still follow a change together.

Ranks of one job are in step, but a message reaches each at its own moment. A change that names an iteration which
some rank has begun when it hears of it would hold there one iteration later than elsewhere.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

__all__ = ["LEAD_S", "MAX_AHEAD", "Pace", "leading"]

# From the order to the last rank's knowing: the daemon's clock, the ranks' idle tick, a busy machine.
LEAD_S = 0.5
MAX_AHEAD = 1000  # iterations in front of the other ranks that a rank can be and still lead them
_LOOKS = 9
_FASTEST_STEP_S = 5e-4  # iterations that begin faster are a jump (set_moment), not steps


def leading(begun: Iterable[int]) -> int:
    """Iterations that the leading rank has begun, of the ranks' counts; 0 before the first.

    A rank further than MAX_AHEAD in front of at least half of those that have begun leads nobody: its count is
    nonsense, or it counts in another way. It follows a change at its own next iteration.
    """
    counts = sorted(count for count in begun if count)
    if not counts:
        return 0
    usual = counts[(len(counts) - 1) // 2]
    return max(count for count in counts if count <= usual + MAX_AHEAD)


class Pace:
    """The times at which the leading rank was seen to have begun further iterations. Not thread-safe."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)

    def look(self, begun: int, now: float) -> None:
        """`begun`: iterations that the leading rank has begun, 0 before the first. now: monotonic seconds."""
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
        """Seconds from one iteration to the next, the median over the last looks; None when not known."""
        steps = [(now - then) / (begun - before) for (then, before), (now, begun) in pairwise(self._looks)]
        return statistics.median(steps) if steps else None

    def next_iteration(self, begun: int, now: float) -> int:
        """The first iteration that no rank will have begun when all have heard of it, LEAD_S from `now`."""
        self.look(begun, now)
        step_s = self.step_s()
        if step_s is None:
            return begun
        into_step_s = min(now - self._looks[-1][0], step_s)  # a step that takes longer may end any moment
        return begun + int((into_step_s + LEAD_S) / step_s)
