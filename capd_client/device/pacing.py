"""The pace of copies (`max_d2h_gbps`): a token bucket that may be in debt, shared by the devices of a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Optional

__all__ = ["Pace"]

# A late look may catch up on this time; pumps look every few milliseconds.
_CREDIT_S = 0.01


class Pace:
    """A limit of `gbps` 10⁹ bytes per second (None: no limit): in any time t at most gbps · (t + 10 ms) and one copy.

    A copy may start while there is no debt, and is paid for afterwards. It may therefore be larger than the bytes of
    10 ms.
    """

    def __init__(self, gbps: Optional[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes_per_s = None if gbps is None else gbps * 1e9
        self._clock = clock
        # The time at which all copies so far are paid for.
        self._paid_at = clock()
        self._lock = threading.RLock()

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._nbytes_per_s is not None

    @property
    def left_s(self) -> float:
        """The seconds until a copy may start; 0: now."""
        return 0.0 if self._nbytes_per_s is None else max(0.0, self._paid_at - self._clock())

    def spend(self, nbytes: int) -> None:
        """Note that a copy of `nbytes` has started."""
        # Read once, because `lift` may come at any moment.
        rate = self._nbytes_per_s
        if rate is not None:
            with self._lock:
                self._paid_at = max(self._paid_at, self._clock() - _CREDIT_S) + nbytes / rate

    def lift(self) -> None:
        """Remove the limit: the job is over, and nothing is left to protect."""
        self._nbytes_per_s = None
