"""Waiting for room (policy block) in the arena or a device ring: until a slot is given back, and only so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Optional

from capd_client.arena.allocator import Slot, SlotAllocator

__all__ = ["Waiting"]


def _nothing() -> None:
    pass


class Waiting:
    """Threads that wait for one of `slots`. Every method is called with `lock` held, which a wait releases.

    max_s: the longest wait of one capture (0: none waits). A wait that ran out without anything given back is not
    repeated until something is: a daemon that is gone, or a device that hangs, costs one wait and not one per capture.
    wake: called when a thread begins to wait.
    """

    def __init__(
        self,
        lock: threading.RLock,
        slots: SlotAllocator,
        max_s: float,
        wake: Callable[[], None] = _nothing,
    ) -> None:
        self.max_s = max_s
        self.count = 0  # threads that wait
        self._wake = wake
        self.closed = False
        self._slots = slots
        self._room = threading.Condition(lock)
        self._stalled = False
        self._given = 0  # how often something was given back

    def allowed(self, seconds: float) -> bool:
        """Whether `take` would wait at all."""
        return seconds > 0 and not self._stalled

    def take(self, nbytes: int, seconds: float) -> Optional[Slot]:
        """A slot of `nbytes`; None when the time is up before there is one, or everything is closed."""
        if not self.allowed(seconds):
            return None
        deadline = time.monotonic() + seconds
        given = self._given
        self.count += 1
        self._wake()
        try:
            while not self.closed:
                left = deadline - time.monotonic()
                if left <= 0 or self._stalled:
                    # The end of a short rest that earlier waits left of the time does not show that all stands still.
                    if given == self._given and 2 * seconds > self.max_s:
                        self._stalled = True
                    return None
                self._room.wait(left)
                slot = None if self.closed else self._slots.take(nbytes)
                if slot is not None:
                    return slot
            return None
        finally:
            self.count -= 1

    def give(self, slot: Slot) -> None:
        """Return a slot, and tell those that wait."""
        self._slots.give(slot)
        self.given()

    def given(self) -> None:
        """Tell those that wait that a slot was returned."""
        self._stalled = False
        self._given += 1
        if self.count:
            self._room.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        self.closed = True
        self._room.notify_all()
