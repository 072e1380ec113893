"""The process of one rank, as far as the kernel tells of it: a pidfd, where there is one."""

from __future__ import annotations

import contextlib
import os
import select
import time

__all__ = ["RETURN_S", "RankProcess"]

RETURN_S = 60.0  # a rank that lost its connection knocks again every 2 s


class RankProcess:
    """Tells whether a rank without a connection can still come back. Not thread-safe: its session holds a lock."""

    def __init__(self) -> None:
        self.lost_at = time.monotonic()  # when its connection was last seen to go
        self._handle: int | None = None

    def follow(self, handle: int | None) -> None:
        """From now on the process behind `handle` (a pidfd, owned from here on; None: unknown)."""
        before, self._handle = self._handle, handle
        if before is not None:
            with contextlib.suppress(OSError):
                os.close(before)

    def lost(self) -> None:
        """Its connection is gone."""
        self.lost_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the process is known to be gone."""
        if self._handle is None:
            return False
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def is_given_up(self, grace_s: float | None, return_s: float) -> bool:
        """Whether a rank without a connection counts as gone.

        A process that lives `return_s` without a connection is no rank any more: after exec it is another program.
        Without a handle a rank is given up after `grace_s`. grace_s None: only the end of the process counts.
        """
        patience_s = grace_s if grace_s is None or self._handle is None else return_s
        waited_s = time.monotonic() - self.lost_at
        return self.ended or (patience_s is not None and waited_s > patience_s)
