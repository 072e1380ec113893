"""The captures and parts that are to be sent, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from capd_client.inflight.capture import COPYING, READY, Capture

__all__ = ["Outbox"]


class Outbox:
    """Two lines: `unsent` by sequence, and before it `resend`, sent on an earlier connection and not settled.

    Called with the queue's lock held, but for `__len__`.
    """

    def __init__(self) -> None:
        self.unsent: deque[Capture] = deque()
        self._resend: deque[Capture] = deque()

    def __len__(self) -> int:
        return len(self.unsent) + len(self._resend)

    def next_batch(self, limit: int) -> list[Capture]:
        """Up to `limit` captures to send now, oldest first; one that is still being copied holds up the rest."""
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
        """Everything that was sent and is not settled is due again."""
        sent = [capture for capture in captures if capture.sent]
        self._resend = deque(sorted(sent, key=lambda capture: capture.descriptor.sequence))

    def all_sent(self, upto: int) -> bool:
        """Whether nothing up to a sequence is here."""
        waiting = [line[0].descriptor.sequence for line in (self._resend, self.unsent) if line]
        return min(waiting, default=upto + 1) > upto

    def clear(self) -> None:
        """Nothing is sent any more."""
        self.unsent.clear()
        self._resend.clear()
