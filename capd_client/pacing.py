"""Spreads copies over time (`max_d2h_gbps`): a token bucket that may be in debt. One thread's, except `lift`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

__all__ = ["Pace"]

_CREDIT_S = 0.01  # what a late look may catch up on; the client thread looks about once per millisecond


class Pace:
    """At most `gbps` 10⁹ bytes per second (None: no limit), over any time t at most gbps · (t + 10 ms) and one copy.

    A copy is let go while there is no debt, and then paid for: so a copy may be larger than what 10 ms bring.
    """

    def __init__(self, gbps: Optional[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes_per_s = None if gbps is None else gbps * 1e9
        self._clock = clock
        self._paid_at = clock()  # when everything let go so far is paid for

    def due(self) -> bool:
        """Whether the next copy may go now."""
        return self._nbytes_per_s is None or self._clock() >= self._paid_at

    def spend(self, nbytes: int) -> None:
        """A copy of `nbytes` was let go."""
        rate = self._nbytes_per_s  # `lift` may come at any moment
        if rate is not None:
            self._paid_at = max(self._paid_at, self._clock() - _CREDIT_S) + nbytes / rate

    def lift(self) -> None:
        """No limit from now on: the job is over, and there is nothing left to protect."""
        self._nbytes_per_s = None
