"""The registry's state of one run: its ranks, its totals, and the progress of its sealing."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from capd.server.rank.orders import Orders
from capd.server.rank.rank import RankSession
from capd.server.rank.steering import RunSteering
from capd.server.runs.attempts import Beside, Member
from capd.store.catalog.rows import SessionRow
from capd.store.catalog.totals import Held

__all__ = ["Run"]

RATE_WINDOW_S = 5.0


@dataclass(slots=True)
class Run:
    """A run: its current ranks (`ranks`) and the last counters of ranks that left (`finished`)."""

    run_id: str
    path: Path
    ranks: dict[bytes, RankSession] = field(default_factory=dict)
    finished: dict[bytes, SessionRow] = field(default_factory=dict)
    opened: bool = False
    # Held by the thread that opens the run.
    opening: threading.Lock = field(default_factory=threading.Lock)
    totals: Held = field(default_factory=Held)
    # See `RunStore.overhead_nbytes`.
    overhead_bytes: int = 0
    # Bytes in the store when this daemon opened the run.
    stored_before: int = 0
    # Of the bytes that came since, those of shards that were moved to an object store.
    moved_nbytes: int = 0
    # The highest attempt of records that came without sessions; -1 without them.
    stored_attempt: int = -1
    # The part that other nodes wrote, and when it was read.
    beside: Beside = field(default_factory=Beside)
    beside_at: float = -math.inf
    # Attempt → the records that the run held when the first rank of it came.
    held_before: dict[int, int] = field(default_factory=dict)
    # Ranks between HELLO and WELCOME.
    arriving: int = 0
    # Since this time, no rank has been connected, arriving or in work.
    quiet_since: float = field(default_factory=time.monotonic)
    # What the run held at the last seal; None: this daemon has not sealed it.
    at_seal: Held | None = None
    sealed_at: float = -math.inf
    sealing: Future[None] | None = None
    at_sealing: Held = field(default_factory=Held)
    # The newest reason why the disk took no record of a rank that is gone.
    why_full: str = ""
    # Pairs of time and raw bytes.
    rates: deque[tuple[float, int]] = field(default_factory=deque)
    steering: RunSteering = field(default_factory=RunSteering)
    # The flight recorder holds records of it.
    holds: bool = False
    # Clients whose death was told to the recorder, and since when those are missing that an earlier daemon had.
    mourned: set[bytes] = field(default_factory=set)
    absent_since: dict[bytes, float] = field(default_factory=dict)
    # What ranks said so far: the largest world size (0: no rank was here), and the labels of keys.
    world_size: int = 0
    quant_types: set[str] = field(default_factory=set)

    def count(self, totals: Held, now: float) -> None:
        """Take the run's totals at `now` (monotonic)."""
        self.totals = totals
        self.rates.append((now, totals.raw_bytes))
        while self.rates[0][0] < now - RATE_WINDOW_S:
            self.rates.popleft()

    def heed(self, rank: RankSession) -> None:
        """Note the facts of a rank that outlive it."""
        self.world_size = max(self.world_size, rank.hello.world_size)
        self.quant_types |= rank.session.quant_types.copy()

    def alive(self) -> list[RankSession]:
        """Return the live ranks, by rank."""
        ranks = [rank for rank in list(self.ranks.values()) if rank.alive]
        return sorted(ranks, key=lambda rank: rank.hello.rank)

    def members(self) -> list[Member]:
        """Return the sessions of the run on all nodes."""
        ranks, rows = list(self.ranks.values()), list(self.finished.values())
        return [*map(Member.of_rank, ranks), *map(Member.of_row, rows), *self.beside.members]

    def steer(self) -> None:
        """Note the progress of the ranks, and send the wanted state to ranks that do not know it."""
        ranks = self.alive()
        self.steering.look(rank.begun for rank in ranks)
        for rank in ranks:
            rank.order(Orders.steer)

    @property
    def added_nbytes(self) -> int:
        """The stored bytes that came since this daemon opened the run, and are still on this disk."""
        added = self.totals.stored_bytes + self.overhead_bytes - self.stored_before
        return max(0, added - self.moved_nbytes)

    @property
    def sealed(self) -> bool:
        """Whether nothing was committed since the last seal."""
        sealed = self.at_seal
        return self.sealing is None and sealed is not None and sealed.rows == self.totals.rows

    @property
    def quiet(self) -> bool:
        """Whether everything is sealed, nothing is held, and no rank is here or may come back."""
        return self.sealed and not (self.holds or self.ranks or self.arriving)

    @property
    def restful_since(self) -> float:
        """The time from which the rest before the next seal counts. Errors of formats alone come long after a seal."""
        sealed = self.at_seal
        if sealed is not None and sealed.records == self.totals.records:
            return max(self.quiet_since, self.sealed_at)
        return self.quiet_since

    def rate_mib_s(self) -> float:
        """Return the raw MiB committed per second over the last RATE_WINDOW_S."""
        if len(self.rates) < 2:
            return 0.0
        (start, first), (end, last) = self.rates[0], self.rates[-1]
        return max(0, last - first) / (end - start) / 2**20
