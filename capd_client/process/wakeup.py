"""A rest of a thread of capd's own that other threads end when there is something to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Wakeup"]


class Wakeup:
    """Rests up to `short_s` seconds are not worth ending: it would cost the waking thread the interpreter."""

    def __init__(self, short_s: float) -> None:
        self._short_s = short_s
        # Taken while nobody has woken the thread. Its release is one call into C: no signal handler runs inside of it.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.dozing = False  # in a long rest

    def wake(self) -> None:
        """End a long rest. Cheap; called by training threads."""
        if self.dozing:
            self.end()

    def end(self) -> None:
        """End a rest of any length; where there is none, the next one."""
        try:  # noqa: SIM105 - a context manager of Python's would take longer, and let a signal handler in
            self._asleep.release()
        except RuntimeError:  # somebody has done so
            pass

    def rest(self, seconds: float, called: Callable[[], bool]) -> None:
        """Wait `seconds`, or less. called: whether there is what `wake` is called for."""
        self.dozing = seconds > self._short_s
        if not (self.dozing and called()):  # by somebody who did not see yet that this thread dozes
            self._asleep.acquire(timeout=seconds)
        self.dozing = False
        self._asleep.acquire(
            blocking=False
        )  # a second waking, or one that came late, does not end the next rest
