"""A rest of the client thread that other threads end when there is something to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Doze"]


class Doze:
    """Rests up to `short_s` seconds are not worth ending: it would cost the waking thread the interpreter."""

    def __init__(self, short_s: float) -> None:
        self._short_s = short_s
        self._woken = threading.Event()
        self.dozing = False  # in a long rest

    def wake(self) -> None:
        """End a long rest. Cheap; called by training threads, wakes once per rest."""
        if self.dozing:
            self.dozing = (
                False  # first: a signal handler that comes by here must not set the event a second time
            )
            self._woken.set()

    def rest(self, seconds: float, called: Callable[[], bool]) -> None:
        """Wait `seconds`, or less. called: whether there is what `wake` is called for."""
        self.dozing = seconds > self._short_s
        if not (self.dozing and called()):  # by somebody who did not see yet that this thread dozes
            self._woken.wait(seconds)
        self.dozing = False
        self._woken.clear()
