"""The outbox: the captures and parts that wait to be sent, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from capd_client.inflight.capture import COPYING, READY, Capture

__all__ = ["Outbox"]


class Outbox:
    """Two lines of captures. The resend line goes first.

    The resend line holds captures that were sent on an earlier connection and are not settled. `unsent` holds all
    others, by sequence. The caller holds the queue's lock, except for `__len__`.
    """

    def __init__(self) -> None:
        self.unsent: deque[Capture] = deque()
        self._resend: deque[Capture] = deque()

    def __len__(self) -> int:
        return len(self.unsent) + len(self._resend)

    def next_batch(self, limit: int) -> list[Capture]:
        """Return up to `limit` captures to send now, oldest first. One that is still being copied stops the batch."""
        batch: list[Capture] = []
        while self._resend and len(batch) < limit:
            capture = self._resend.popleft()
            if capture.state == READY:
                batch.append(capture)
        unsent = self.unsent
        while unsent and len(batch) < limit and unsent[0].state != COPYING:
            capture = unsent.popleft()
            if capture.state == READY:
                capture.sent = True
                batch.append(capture)
        return batch

    def send_again(self, captures: Iterable[Capture]) -> None:
        """Put every sent and unsettled capture into the resend line."""
        sent = [capture for capture in captures if capture.sent]
        self._resend = deque(sorted(sent, key=lambda capture: capture.descriptor.sequence))

    def all_sent(self, upto: int) -> bool:
        """Return whether no capture up to the sequence `upto` waits."""
        waiting = [line[0].descriptor.sequence for line in (self._resend, self.unsent) if line]
        return min(waiting, default=upto + 1) > upto

    def clear(self) -> None:
        """Empty both lines."""
        self.unsent.clear()
        self._resend.clear()
