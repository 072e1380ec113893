"""The limits of a transfer: bytes per second, and bytes in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from capd.store.upload.sending.halt import Halt

__all__ = ["Bandwidth", "Rate", "TransferMemory", "no_limit"]

_LOOK_S = 0.2

Rate = Callable[[], float | None]
"""Returns the bytes per second that may go at this moment; None for no limit. It is asked before each piece."""


def no_limit() -> None:
    """Let everything go at once, as a `Rate`."""


class Bandwidth:
    """A token bucket: so many bytes per second, over all threads. Pieces wait for their turn."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        """Set the limit."""
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        # The time at which everything that was taken so far has gone.
        self._free_at = 0.0

    def piece_nbytes(self, most: int) -> int:
        """Return the bytes of a piece: at most `most`, and not more than a quarter of a second."""
        rate = self._rate()
        return most if rate is None else max(16 << 10, min(most, int(rate / 4)))

    def reserve(self, nbytes: int) -> float:
        """Take bytes out of the bucket. Return the seconds to wait before they may go."""
        rate = self._rate()
        if rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / rate
            return begin - now

    def take(self, nbytes: int, halt: Halt) -> None:
        """Wait until bytes may go.

        Raises:
            UploadStopped: The upload ends before that.
        """
        left = self.reserve(nbytes)
        while left > 0:
            halt.check_in_hand()
            time.sleep(min(left, _LOOK_S))
            left -= _LOOK_S


class TransferMemory:
    """The bytes that all transfers together may hold. A single object that is larger goes alone."""

    def __init__(self, nbytes: int) -> None:
        self._size = self._free = nbytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, nbytes: int, halt: Halt) -> Iterator[None]:
        """Hold bytes for some statements. Wait until there is room.

        Raises:
            UploadStopped: The upload ends before that.
        """
        nbytes = min(nbytes, self._size)
        with self._changed:
            while self._free < nbytes:
                halt.check()
                self._changed.wait(_LOOK_S)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()
