"""What the registry keeps of one run: its ranks, its totals, and where its sealing stands."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from capd.server.jobs import RunTotals
from capd.server.rank import RankSession
from capd.store.catalog import SessionRow

__all__ = ["Run"]

RATE_WINDOW_S = 5.0


@dataclass(slots=True)
class Run:
    """One run: its ranks now (`ranks`) and the last counters of those that left (`finished`)."""

    run_id: str
    path: Path
    ranks: dict[bytes, RankSession] = field(default_factory=dict)
    finished: dict[bytes, SessionRow] = field(default_factory=dict)
    opened: bool = False
    totals: RunTotals = field(default_factory=lambda: RunTotals(0, 0, 0))
    stored_before: int = 0  # bytes in the store when this daemon opened the run
    arriving: int = 0  # ranks between HELLO and WELCOME
    quiet_since: float = field(default_factory=time.monotonic)  # no rank connected, arriving or in work
    sealed_records: int = -1  # records at the last seal; -1: not sealed by this daemon
    sealing: Future[None] | None = None
    sealing_records: int = 0
    rates: deque[tuple[float, int]] = field(default_factory=deque)  # (time, raw bytes)

    def count(self, totals: RunTotals, now: float) -> None:
        """Take the run's totals as they are `now` (monotonic)."""
        self.totals = totals
        self.rates.append((now, totals.raw_bytes))
        while self.rates[0][0] < now - RATE_WINDOW_S:
            self.rates.popleft()

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
