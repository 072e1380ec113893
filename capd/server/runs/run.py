"""What the registry keeps of one run: its ranks, its totals, and where its sealing stands.

Of a run that it has forgotten only the bytes remain, which count against the disk budget.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from capd.server.rank.orders import Orders
from capd.server.rank.rank import RankSession
from capd.server.rank.steering import RunSteering
from capd.store.catalog.rows import SessionRow
from capd.store.catalog.totals import Held

__all__ = ["Forgotten", "Run"]

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 5.0


@dataclass(slots=True)
class Run:
    """One run: its ranks now (`ranks`) and the last counters of those that left (`finished`)."""

    run_id: str
    path: Path
    ranks: dict[bytes, RankSession] = field(default_factory=dict)
    finished: dict[bytes, SessionRow] = field(default_factory=dict)
    opened: bool = False
    totals: Held = field(default_factory=Held)
    beside_bytes: int = 0  # catalog and small-record logs
    stored_before: int = 0  # bytes in the store when this daemon opened the run
    arriving: int = 0  # ranks between HELLO and WELCOME
    quiet_since: float = field(default_factory=time.monotonic)  # no rank connected, arriving or in work
    sealed_records: int = -1  # records at the last seal; -1: not sealed by this daemon
    sealing: Future[None] | None = None
    sealing_records: int = 0
    why_full: str = ""  # why the disk took no record of a rank that is gone; the newest such reason
    rates: deque[tuple[float, int]] = field(default_factory=deque)  # (time, raw bytes)
    steering: RunSteering = field(default_factory=RunSteering)

    def count(self, totals: Held, now: float) -> None:
        """Take the run's totals as they are `now` (monotonic)."""
        self.totals = totals
        self.rates.append((now, totals.raw_bytes))
        while self.rates[0][0] < now - RATE_WINDOW_S:
            self.rates.popleft()

    def alive(self) -> list[RankSession]:
        """The ranks that are there, by rank."""
        ranks = [rank for rank in list(self.ranks.values()) if rank.alive]
        return sorted(ranks, key=lambda rank: rank.hello.rank)

    def steer(self) -> None:
        """Look where the ranks are, and tell those that do not know it what is wanted of them."""
        ranks = self.alive()
        self.steering.look(rank.begun for rank in ranks)
        for rank in ranks:
            rank.order(Orders.steer)

    @property
    def added_nbytes(self) -> int:
        """Stored bytes that came since this daemon opened the run."""
        return max(0, self.totals.stored_bytes + self.beside_bytes - self.stored_before)

    @property
    def sealed(self) -> bool:
        """Nothing was committed since the last seal."""
        return self.sealing is None and self.sealed_records == self.totals.records

    def rate_mib_s(self) -> float:
        """Raw MiB committed per second over the last RATE_WINDOW_S."""
        if len(self.rates) < 2:
            return 0.0
        (start, first), (end, last) = self.rates[0], self.rates[-1]
        return max(0, last - first) / (end - start) / 2**20


class Forgotten:
    """The runs that the registry let go of. `add` and `tend` are called under its lock, `wait` is not."""

    def __init__(self) -> None:
        self.added_nbytes = 0  # what this daemon had added to them
        self._closings: dict[str, Future[None]] = {}

    def add(self, run: Run, closing: Future[None]) -> None:
        """Count a run; `closing` is done once its store is closed."""
        self.added_nbytes += run.added_nbytes
        self._closings[run.run_id] = closing

    def wait(self, run_id: str) -> None:
        """Return once the run can be opened again."""
        closing = self._closings.get(run_id)
        if closing is not None:
            wait([closing])

    def tend(self) -> None:
        """Note which runs are closed, and say which could not be."""
        for run_id, closing in list(self._closings.items()):
            if closing.done():
                del self._closings[run_id]
                error = closing.exception()
                if error is not None:
                    logger.error("run %s could not be closed: %s", run_id, error)
