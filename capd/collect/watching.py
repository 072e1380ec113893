"""When a type's job of a collection run is over, and how it ended: decided from what is seen of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from capd.collect.request import Request
from capd_client.quota import Collected

__all__ = ["COLLECTED", "Ending", "Look", "Outcome", "Watcher"]

Outcome = Literal[
    "complete",
    "stable",
    "ended",
    "full",
    "incomplete",
    "nothing",
    "failed",
    "timeout",
    "daemon",
    "interrupted",
]

COLLECTED: frozenset[Outcome] = frozenset({"complete", "stable", "ended"})
"""The outcomes of a type that need no second try. ended: by itself, with all that it was to give."""


@dataclass(frozen=True)
class Look:
    """What is seen of a job. records: kept of it until now. daemon_ended: the one that was started for this job."""

    now_s: float
    ranks: Sequence[Collected]
    records: int
    disk_full: bool = False
    daemon_ended: bool = False


@dataclass(frozen=True)
class Ending:
    """How a job of a collection run ended, with the reason in words."""

    outcome: Outcome
    reason: str


class Watcher:
    """Looks at one job until its ending is known. Pure: it is told what there is to see, and the time."""

    def __init__(self, request: Request, now_s: float) -> None:
        self._request = request
        self._began_s = self._changed_s = now_s
        self._records = 0
        self.kept = 0  # micro-batches, of the rank that has the fewest

    def look(self, look: Look) -> Ending | None:
        """Why a job that runs is to be ended now; None: it goes on."""
        ranks = self._see(look)
        if ranks and all(one.state == "complete" for one in ranks):
            return Ending("complete", self._how_many())
        quiet_s = look.now_s - self._changed_s
        if self._records and quiet_s >= self._request.stable_for_s:
            reason = f"no new record for {self._request.stable_for_s:g} s"
            if self._has_all(ranks):
                return Ending("complete", f"{self._how_many()}, and {reason}")
            if self._request.until == "stable":
                return Ending("stable", reason)
        if look.disk_full:
            return self._full()
        if look.daemon_ended:
            return Ending("daemon", "the daemon ended before the job")
        if self._request.timeout_s and look.now_s - self._began_s >= self._request.timeout_s:
            return Ending("timeout", f"not complete after {self._request.timeout_s:g} s (--timeout)")
        return None

    def ended(self, look: Look, code: int) -> Ending:
        """How the job ended by itself, with this exit code; nothing of it is on its way any more."""
        ranks = self._see(look)
        if code != 0:
            return Ending("failed", f"the job ended with exit code {code}")
        if not self._records:
            return Ending("nothing", "the job ended, and nothing was captured")
        if self._has_all(ranks):
            return Ending("complete", self._how_many())
        if ranks and self._request.micro_batches:
            return Ending(
                "incomplete",
                f"the job ended with {self.kept} of {self._request.micro_batches} micro-batches; let it train "
                "longer, or lower --control-iter",
            )
        return Ending("ended", "the job ended by itself")

    def _see(self, look: Look) -> list[Collected]:
        """The ranks of this node; none as long as some have not begun."""
        if look.records != self._records:
            self._records, self._changed_s = look.records, look.now_s
        ranks = _farthest(look.ranks)
        if len(ranks) < max((one.local_world_size for one in ranks), default=0):
            ranks = []
        self.kept = min((one.kept for one in ranks), default=0)
        return ranks

    def _full(self) -> Ending:
        reason = "the space is used up (max_disk, keep_free)"
        return Ending("full" if self._request.micro_batches else "ended", reason)

    def _has_all(self, ranks: Sequence[Collected]) -> bool:
        return bool(ranks) and all(one.state != "collecting" for one in ranks)

    def _how_many(self) -> str:
        count = self._request.micro_batches
        return f"{count} micro-batch{'' if count == 1 else 'es'} of each rank"


def _farthest(ranks: Sequence[Collected]) -> list[Collected]:
    """Of each rank the process that got farthest: a launcher may have restarted it."""
    order = ("collecting", "reached", "complete")
    found: dict[int, Collected] = {}
    for one in sorted(ranks, key=lambda one: (order.index(one.state), one.kept)):
        found[one.rank] = one
    return list(found.values())
