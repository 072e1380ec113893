"""The pause after failures: it doubles up to five minutes, and differs between the nodes of a cluster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

__all__ = ["Backoff"]

_FIRST_S = 1.0
_MOST_S = 300.0


class Backoff:
    """When to try again. A success begins anew."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        most_s: float = _MOST_S,
    ) -> None:
        self._clock, self._chance, self._most_s = clock, chance, most_s
        self._failures = 0
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to try."""
        return self._clock() >= self._next

    def failed(self, *, slowly: bool = False) -> None:
        """Wait longer than after the last failure. slowly: at once as long as after many."""
        self._failures = min(self._failures + 1, 30)
        pause_s = self._most_s if slowly else min(self._most_s, _FIRST_S * 2**self._failures)
        # Between a half and the whole, so that the nodes of a job do not come at once.
        self._next = self._clock() + pause_s * (0.5 + self._chance() / 2)

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures, self._next = 0, 0.0
