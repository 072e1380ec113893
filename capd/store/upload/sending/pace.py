"""The limits of a transfer: bytes per second, and bytes in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from capd.store.upload.sending.halt import Halt

__all__ = ["Bandwidth", "TransferMemory"]

_LOOK_S = 0.2


class Bandwidth:
    """A token bucket: so many bytes per second, over all threads. Pieces wait for their turn."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Set the limit; None for none."""
        self._rate, self._clock = bytes_per_s, clock
        self._lock = threading.Lock()
        # The time at which everything that was taken so far has gone.
        self._free_at = 0.0

    def piece_nbytes(self, most: int) -> int:
        """Return the bytes of a piece: at most `most`, and not more than a quarter of a second."""
        return most if self._rate is None else max(16 << 10, min(most, int(self._rate / 4)))

    def reserve(self, nbytes: int) -> float:
        """Take bytes out of the bucket. Return the seconds to wait before they may go."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
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
