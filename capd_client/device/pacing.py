"""Spreads copies over time (`max_d2h_gbps`): a token bucket that may be in debt, shared by the devices of a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Optional

__all__ = ["Pace"]

_CREDIT_S = 0.01  # what a late look may catch up on; pumps look after milliseconds
_PATIENCE_S = 0.02  # longer than a pump rests


class Pace:
    """At most `gbps` 10⁹ bytes per second (None: no limit), over any time t at most gbps · (t + 10 ms) and one copy.

    A copy is let go while there is no debt, and then paid for: so a copy may be larger than what 10 ms bring. Those who
    ask take turns: who had the last copy waits for one of another who was refused since.
    """

    def __init__(self, gbps: Optional[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes_per_s = None if gbps is None else gbps * 1e9
        self._clock = clock
        self._paid_at = clock()  # when everything let go so far is paid for
        self._lock = threading.RLock()
        self._last: object = None
        self._refused: dict[object, float] = {}  # when each was refused last

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._nbytes_per_s is not None

    @property
    def left_s(self) -> float:
        """Seconds until a copy may go; 0: now."""
        return 0.0 if self._nbytes_per_s is None else max(0.0, self._paid_at - self._clock())

    def ask(self, who: object) -> bool:
        """Whether the next copy of `who` may go now."""
        if self._nbytes_per_s is None:
            return True
        with self._lock:
            now = self._clock()
            if now < self._paid_at or (who is self._last and self._waits_another(who, now)):
                self._refused[who] = now
                return False
            self._refused.pop(who, None)
            return True

    def _waits_another(self, who: object, now: float) -> bool:
        """Whether another one was refused a short while ago; one that does not come back keeps nobody waiting."""
        return any(other is not who and now - at <= _PATIENCE_S for other, at in self._refused.items())

    def spend(self, who: object, nbytes: int) -> None:
        """A copy of `nbytes` was let go."""
        rate = self._nbytes_per_s  # `lift` may come at any moment
        if rate is not None:
            with self._lock:
                self._last = who
                self._paid_at = max(self._paid_at, self._clock() - _CREDIT_S) + nbytes / rate

    def leave(self, who: object) -> None:
        """Nothing of `who` is due any more."""
        if self._nbytes_per_s is not None:
            with self._lock:
                self._refused.pop(who, None)

    def lift(self) -> None:
        """No limit from now on: the job is over, and there is nothing left to protect."""
        self._nbytes_per_s = None
