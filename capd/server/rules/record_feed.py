"""The bounded queue between the append thread and the rules. It never blocks; what does not fit is counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from capd.store.format.frames import RecordRow, SeriesHeader

__all__ = ["MAX_WAITING", "CommittedRecords", "RecordFeed"]

CommittedRecords = Sequence[tuple[SeriesHeader, RecordRow]]

MAX_WAITING = 16_384
"""The records that wait, some 30 MiB with their statistics."""


class RecordFeed:
    """Records on their way to the rules. The append thread and the recorder's offer, and one thread takes.

    Attributes:
        left_out: The records for which there was no room, here or in the recorder.
        offered: All records that came.
    """

    def __init__(self) -> None:
        """Begin empty."""
        # Its operations are atomic.
        self._waiting: deque[tuple[str, CommittedRecords]] = deque()
        self._taken = self._kept = 0
        self.offered = self.left_out = 0
        self._offering = threading.Lock()

    def offer(self, run_id: str, records: CommittedRecords) -> None:
        """Hand over committed or held records of a run."""
        if not records:
            return
        with self._offering:
            self.offered += len(records)
            if self._kept - self._taken + len(records) > MAX_WAITING:
                self.left_out += len(records)
                return
            self._kept += len(records)
            self._waiting.append((run_id, records))

    def leave_out(self, count: int) -> None:
        """Count held records that the rules cannot see."""
        with self._offering:
            self.offered += count
            self.left_out += count

    def take(self) -> tuple[str, CommittedRecords] | None:
        """Return the next records; None without any."""
        try:
            found = self._waiting.popleft()
        except IndexError:
            return None
        self._taken += len(found[1])
        return found
