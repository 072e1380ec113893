"""The steering of one run: the state that `capd ctl` wants, for every rank, now or later.

The state is kept in memory, here and in the ranks. Each rank reports its state on every connection. A restarted daemon
therefore learns the newest state from any rank that was steered.
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
    """The wanted state of one run. The threads of tools, of ranks and of the clock call it."""

    def __init__(self) -> None:
        # None: never steered, as this daemon knows.
        self.wanted: Steer | None = None
        self._lock = threading.Lock()
        self._pace = Pace()
        # Whether some rank already follows `wanted`.
        self._in_force = False
        self._last_id = 0

    def look(self, begun: Iterable[int]) -> None:
        """Note the iterations that the run's ranks have begun. The clock calls it."""
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
        """Make this the wanted state. `begun`: the iterations that each rank has begun.

        Without a `selection`, ranks follow the job's own. Without `from_iteration`, the order holds from the next
        iteration that the ranks can begin together.
        """
        with self._lock:
            if from_iteration is None:
                from_iteration = self._pace.next_iteration(leading(begun), time.monotonic())
            self.wanted = Steer(
                id=self._next_id(), from_iteration=from_iteration, capturing=capturing, selection=selection
            )
            self._in_force = False
            return self.wanted

    def drain(self) -> Drain:
        """Return a new DRAIN for the ranks."""
        with self._lock:
            return Drain(self._next_id())

    def learn(self, steered: Steered) -> None:
        """Take a rank's report of its state, which may be new to this daemon. The clock passes it to other ranks."""
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
        """Return the order that a rank in the state `steered` still needs; None if it needs none.

        It holds at once if other ranks already follow it.
        """
        with self._lock:
            wanted = self.wanted
            if wanted is None or (steered is not None and steered.id >= wanted.id):
                return None
            return replace(wanted, from_iteration=0) if self._in_force else wanted

    def _next_id(self) -> int:
        """Return an id above all earlier ones, also above those of an earlier daemon."""
        self._last_id = max(self._last_id + 1, time.time_ns())
        return self._last_id
