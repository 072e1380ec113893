"""The bounded queues between the append thread and the rules. They never block; what does not fit is counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from capd.store.format.frames import RecordRow, SeriesHeader

__all__ = ["MAX_WAITING", "MAX_WAITING_ERRORS", "CommittedRecord", "RecordFeed"]

CommittedRecord = tuple[SeriesHeader, RecordRow]
Item = TypeVar("Item")

MAX_WAITING = 16_384
"""The records that wait, 30 to 90 MiB with their statistics."""

MAX_WAITING_ERRORS = 4096
"""The errors of records that wait, at most 32 MiB."""


class RecordFeed(Generic[Item]):
    """Records, or their errors, on their way to the rules. Several threads offer, and one takes.

    Attributes:
        left_out: The records for which there was no room, here or in the recorder.
        offered: All records that came.
    """

    def __init__(self, most: int = MAX_WAITING) -> None:
        """Begin empty, with room for so many records."""
        self._most = most
        # Its operations are atomic.
        self._waiting: deque[tuple[str, Sequence[Item]]] = deque()
        self._taken = self._kept = 0
        self.offered = self.left_out = 0
        self._offering = threading.Lock()

    def offer(self, run_id: str, records: Sequence[Item]) -> None:
        """Hand over records of a run."""
        if not records:
            return
        with self._offering:
            self.offered += len(records)
            if self._kept - self._taken + len(records) > self._most:
                self.left_out += len(records)
                return
            self._kept += len(records)
            self._waiting.append((run_id, records))

    def leave_out(self, count: int) -> None:
        """Count held records that the rules cannot see."""
        with self._offering:
            self.offered += count
            self.left_out += count

    def take(self) -> tuple[str, Sequence[Item]] | None:
        """Return the next records; None without any."""
        try:
            found = self._waiting.popleft()
        except IndexError:
            return None
        self._taken += len(found[1])
        return found
