"""The rests of the client thread. Every round costs the job 200 to 350 µs, and every message costs the daemon time.

A rest lasts 50 ms while nobody waits and at most an eighth of the arena is taken. The captures of this time are sent
together, and a capture that exceeds the eighth ends the rest. While at least half of the arena is free, a rest gives
the daemon time for a tenth of the arena, at least 5 ms. Otherwise it lasts 1 ms, and twice as long after each round
without work. It lasts at most 5 ms while copies from a device are under way.
"""

from __future__ import annotations

from collections.abc import Callable

from capd_client.inflight.queue import Queue

__all__ = ["EASY_TICK_S", "IDLE_TICK_S", "TICK_S", "Rests"]

TICK_S = 0.001
EASY_TICK_S = 0.005
IDLE_TICK_S = 0.05
# In bytes. No daemon takes more from one rank.
_TAKEN_PER_S = 1e9


class Rests:
    """The rests of one client thread.

    Args:
        queue: The in-flight queue.
        copying: Returns whether copies from a device are under way.
    """

    def __init__(self, queue: Queue, copying: Callable[[], bool]) -> None:
        self._queue = queue
        self._copying = copying
        self._tick_s = TICK_S

    def easy_s(self) -> float:
        """Return the longest rest while captures continue to come; 0 if somebody waits for room, or soon will."""
        queue = self._queue
        if not queue.roomy:
            return 0.0
        # Small tensors come faster than room runs out.
        if queue.behind:
            return EASY_TICK_S
        if queue.calm:
            return IDLE_TICK_S
        # In this time the daemon could take at most a tenth of the arena.
        return max(EASY_TICK_S, min(queue.slots.capacity / 10 / _TAKEN_PER_S, IDLE_TICK_S))

    def next_tick_s(self, worked: bool, easy_s: float) -> float:
        """Return the length of the next rest, if nothing ends it.

        Args:
            worked: Whether the round had something to do.
            easy_s: The result of `easy_s`.
        """
        # A finished copy of a device wakes nobody. If copies are awaited, the rest is short, unless `wake` can end it.
        idle_s = EASY_TICK_S if not easy_s and self._copying() else IDLE_TICK_S
        self._tick_s = TICK_S if worked else min(self._tick_s * 2, idle_s)
        return self._tick_s
