"""The keeps of a rank: what the job asks of the daemon's flight recorder, until the daemon has answered.

Any thread may ask, also in a signal handler. The client thread sends what waits on every new connection again, because
a daemon that was killed may not have heard it. The daemon takes a repetition as the same keep.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Optional

from capd_client.process.log import RateLimitedLog
from capd_client.process.text import printable
from capd_client.protocol.control import Keep, KeepReply

__all__ = ["Keeps"]

_MOST = 16
_MAX_REASON_CHARS = 200


class Keeps:
    """The keeps that the daemon has not answered yet, oldest first.

    Args:
        notices: The log.
    """

    def __init__(self, notices: RateLimitedLog) -> None:
        self._notices = notices
        self._ids = itertools.count(1)
        # Appending and taking are one step each, so no lock is held where a signal handler asks.
        self._waiting: deque[Keep] = deque(maxlen=_MOST)

    @property
    def waiting(self) -> bool:
        """Whether a keep waits for the daemon's answer."""
        return bool(self._waiting)

    def ask(self, reason: str, iteration: Optional[int]) -> None:
        """Ask to keep the iterations around one; None: around the newest one. Beyond 16 the oldest is forgotten."""
        text = printable(str(reason))[:_MAX_REASON_CHARS] or "keep"
        if len(self._waiting) == _MOST:
            self._notices.warn("keeps", "%d keeps wait for the daemon; the oldest one is forgotten", _MOST)
        self._waiting.append(Keep(next(self._ids), text, iteration))

    def after(self, id_: int) -> list[Keep]:
        """Return the keeps that wait and were asked after the one with this id."""
        return [keep for keep in tuple(self._waiting) if keep.id > id_]

    def answered(self, kept: KeepReply) -> None:
        """Take the daemon's answer, and report why it keeps nothing."""
        for keep in tuple(self._waiting):
            if keep.id == kept.id:
                # It may be gone, if the oldest one was forgotten in the meantime.
                try:
                    self._waiting.remove(keep)
                except ValueError:
                    return
                if kept.problem:
                    self._notices.warn("keep", "keep(%r): %s", keep.reason, kept.problem)
                return
