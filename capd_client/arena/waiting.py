"""The waits for room in the arena or a device ring (policy block), until a slot is free or the time is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Optional

from capd_client.arena.allocator import Slot, SlotAllocator

__all__ = ["Waiting"]


class Waiting:
    """The threads that wait for one of `slots`. The caller of every method holds `lock`, which a wait releases.

    A wait may run out without any slot given back. Then no capture waits until a slot is given back. So an absent
    daemon or a hanging device costs one wait, not one wait per capture.

    Args:
        lock: The lock of the slots.
        slots: The slots.
        max_s: The longest wait of one capture; 0: no capture waits.
        wake: Called when a thread begins to wait.
    """

    def __init__(
        self,
        lock: threading.RLock,
        slots: SlotAllocator,
        max_s: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_s = max_s
        # The number of waiting threads.
        self.count = 0
        self._wake = wake
        self.closed = False
        self._slots = slots
        self._room = threading.Condition(lock)
        self._stalled = False
        # The number of slots that were given back.
        self._given = 0

    def take(self, nbytes: int, seconds: float) -> Optional[Slot]:
        """Wait up to `seconds` for a slot of `nbytes`. Return None if there is none in time, or after `close`."""
        if seconds <= 0 or self._stalled:
            return None
        deadline = time.monotonic() + seconds
        given = self._given
        self.count += 1
        self._wake()
        try:
            while not self.closed:
                left = deadline - time.monotonic()
                if left <= 0 or self._stalled:
                    # Earlier waits may have left only a short time. Its end does not prove that nothing moves.
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
        """Take a slot back, and notify the waiting threads."""
        self._slots.give(slot)
        self.given()

    def given(self) -> None:
        """Notify the waiting threads that a slot was given back."""
        self._stalled = False
        self._given += 1
        if self.count:
            self._room.notify_all()

    def close(self) -> None:
        """End all waits, and allow no more."""
        self.closed = True
        self._room.notify_all()
