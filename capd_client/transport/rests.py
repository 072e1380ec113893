"""How long the client thread rests: every round costs the job 200 to 350 µs, and the daemon more for each message.

50 ms while nobody waits and at most an eighth of the arena is taken: what comes meanwhile goes out together, and a
capture that takes more than this eighth ends the rest. While at least half of the arena is free, as long as the daemon
needs for a tenth of it, 5 ms at least. 1 ms otherwise, and twice as long after each round that had nothing to do; at
most 5 ms while copies from a device are under way.
"""

from __future__ import annotations

from collections.abc import Callable

from capd_client.inflight.queue import Queue

__all__ = ["EASY_TICK_S", "IDLE_TICK_S", "TICK_S", "Rests"]

TICK_S = 0.001
EASY_TICK_S = 0.005
IDLE_TICK_S = 0.05
_TAKEN_PER_S = 1e9  # bytes: no daemon takes more from one rank


class Rests:
    """The rests of one client thread. copying: whether copies from a device are under way."""

    def __init__(self, queue: Queue, copying: Callable[[], bool]) -> None:
        self._queue = queue
        self._copying = copying
        self._tick_s = TICK_S

    def easy_s(self) -> float:
        """How long a rest may be while captures keep coming; 0 where somebody waits for room, or soon will."""
        queue = self._queue
        if not queue.roomy:
            return 0.0
        if queue.behind:  # small tensors come faster than room runs out
            return EASY_TICK_S
        if queue.calm:
            return IDLE_TICK_S
        # What the daemon could have taken meanwhile is no more than a tenth of the arena.
        return max(EASY_TICK_S, min(queue.slots.capacity / 10 / _TAKEN_PER_S, IDLE_TICK_S))

    def next_tick_s(self, worked: bool, easy_s: float) -> float:
        """The next rest, if nothing ends it. worked: whether the round had something to do."""
        # What a device brings wakes nobody: where that is waited for no rest is long, unless `wake` can end it.
        idle_s = EASY_TICK_S if not easy_s and self._copying() else IDLE_TICK_S
        self._tick_s = TICK_S if worked else min(self._tick_s * 2, idle_s)
        return self._tick_s
