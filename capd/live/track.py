"""The track of one figure over the last minute, from which rates and sparklines are derived."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

__all__ = ["HISTORY_S", "RATE_S", "Track"]

HISTORY_S = 60.0
"""The time that a track covers, in seconds."""
RATE_S = 5.0
"""The time over which a rate is taken. The daemon commits in batches, so a shorter one jumps."""

_LEAST_GAP_S = 0.45
# A longer gap between two values is a time without answers: nothing is known of it.
_MOST_GAP_S = 5.0


class Track:
    """The values of one figure, at most two a second, over HISTORY_S."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        # One value before the minute, so that a rate is known at its beginning.
        self._points: deque[tuple[float, float]] = deque(maxlen=int(HISTORY_S / _LEAST_GAP_S) + 2)

    def add(self, now: float, value: float) -> None:
        """Append the value of this moment. One that follows too soon replaces the one before it."""
        points = self._points
        while len(points) > 1 and now - points[1][0] > HISTORY_S:
            points.popleft()
        if len(points) > 1 and now - points[-2][0] < _LEAST_GAP_S:
            points.pop()
        points.append((now, value))

    def count(self, now: float, value: float) -> None:
        """Append the value of a counter. A value below the one before means that the counter began again."""
        if self._points and value < self._points[-1][1]:
            self._points.clear()
        self.add(now, value)

    def rate(self, over_s: float = RATE_S) -> float | None:
        """Return the change per second over the last `over_s` seconds; None with fewer than two values."""
        points = self._points
        if len(points) < 2:
            return None
        end, value = points[-1]
        at = len(points) - 2
        while at and end - points[at][0] < over_s:
            at -= 1
        start, first = points[at]
        return (value - first) / (end - start) if end > start else None

    def covered_s(self) -> float:
        """Return the seconds from the first value to the last."""
        return self._points[-1][0] - self._points[0][0] if self._points else 0.0

    def rates(self, now: float, points: int = 60) -> list[float | None]:
        """Return the change per second in each of `points` equal parts of the last minute, the oldest first.

        None where nothing is known: before the first value, and while no values came.
        """
        width = HISTORY_S / points
        found: list[float | None] = [None] * points
        weights = [0.0] * points
        start = now - HISTORY_S
        known = list(self._points)
        for (begin, first), (end, last) in pairwise(known):
            if not 0 < end - begin <= _MOST_GAP_S:
                continue
            slope = (last - first) / (end - begin)
            low, high = max(0, int((begin - start) / width)), min(points - 1, int((end - start) / width))
            for part in range(low, high + 1):
                share = min(end, start + (part + 1) * width) - max(begin, start + part * width)
                if share > 0:
                    total = (found[part] or 0.0) * weights[part] + slope * share
                    weights[part] += share
                    found[part] = total / weights[part]
        return found
