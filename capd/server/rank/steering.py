"""How the ranks of one run are steered: the state that `capd ctl` wants, given to every rank, now or later.

The state is kept in memory, here and in the ranks. Each rank tells what it holds on every connection, so a daemon that
was started anew knows the newest again from any rank that was steered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from msgspec.structs import replace

from capd.server.rank.pace import Pace, leading
from capd_client.protocol.control import Drain, Steer, Steered
from capd_client.protocol.selection import Selection

__all__ = ["RunSteering"]


class RunSteering:
    """The wanted state of one run. Called from tools', ranks' and the clock's threads."""

    def __init__(self) -> None:
        self.wanted: Steer | None = None  # None: never steered, as far as this daemon knows
        self._lock = threading.Lock()
        self._pace = Pace()
        self._in_force = False  # some rank follows `wanted` already
        self._last_id = 0

    def look(self, begun: Iterable[int]) -> None:
        """The clock: the iterations that the run's ranks have begun by now."""
        with self._lock:
            self._pace.look(leading(begun), time.monotonic())

    def order(
        self,
        *,
        capturing: bool,
        selection: Selection | None,
        from_iteration: int | None,
        begun: Iterable[int],
    ) -> Steer:
        """Make this the wanted state. `from_iteration` None: the next that the ranks can begin together."""
        with self._lock:
            if from_iteration is None:
                from_iteration = self._pace.next_iteration(leading(begun), time.monotonic())
            self.wanted = Steer(
                id=self._next_id(), from_iteration=from_iteration, capturing=capturing, selection=selection
            )
            self._in_force = False
            return self.wanted

    def drain(self) -> Drain:
        """A new question to the ranks."""
        with self._lock:
            return Drain(self._next_id())

    def told(self, steered: Steered) -> None:
        """A rank tells what it holds, which may be news to this daemon. The clock hands it on to other ranks."""
        newest = steered.pending or steered.in_force
        with self._lock:
            known = 0 if self.wanted is None else self.wanted.id
            if newest is None or not known <= newest.id <= time.time_ns():
                return
            if newest.id > known:
                self.wanted, self._in_force = newest, False
                self._last_id = max(self._last_id, newest.id)
            self._in_force |= newest is steered.in_force

    def for_rank(self, steered: Steered | None) -> Steer | None:
        """What a rank that holds `steered` is still to be told: to follow at once, where others do so already."""
        with self._lock:
            wanted = self.wanted
            if wanted is None or (steered is not None and steered.id >= wanted.id):
                return None
            return replace(wanted, from_iteration=0) if self._in_force else wanted

    def _next_id(self) -> int:
        """Above all before, also those of a daemon before this one."""
        self._last_id = max(self._last_id + 1, time.time_ns())
        return self._last_id
