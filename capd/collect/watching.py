"""The watcher of one type's job in a collection run: it decides from observations when and how the job ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from capd.collect.request import CollectionRequest
from capd_client.protocol.quota import Collected, QuotaState

__all__ = ["COLLECTED", "Ending", "Observation", "Outcome", "Watcher"]

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
"""The outcomes that need no second try. "ended": the job ended by itself with all its captures kept."""


@dataclass(frozen=True)
class Observation:
    """The observation of a job at one time.

    Attributes:
        now_s: The time.
        ranks: The documents of the job's processes.
        records: The records of the job that are kept so far.
        lost: The captures of the job that were dropped against the user's wish.
        disk_full: Whether captures were dropped because the space is used up.
        why_full: The limit that was reached.
        daemon_ended: Whether the daemon of this job has ended. After the job, also whether it does not answer.
    """

    now_s: float
    ranks: Sequence[Collected]
    records: int
    lost: int = 0
    disk_full: bool = False
    why_full: str = ""
    daemon_ended: bool = False


@dataclass(frozen=True)
class Ending:
    """The ending of a job of a collection run, with the reason in words."""

    outcome: Outcome
    reason: str


class Watcher:
    """A pure state machine that decides the ending of one job. Its inputs are observations, which include the time."""

    def __init__(self, request: CollectionRequest, now_s: float) -> None:
        self._request = request
        self._began_s = self._changed_s = now_s
        self._records = 0
        # The processes on this node that have written a document.
        self._ranks: list[Collected] = []
        # The number of processes without one: they train no captured module, or have not begun.
        self._silent = 0
        # The micro-batches of the rank with the fewest.
        self.micro_batches = 0

    def look(self, look: Observation) -> Ending | None:
        """Return the reason to end a running job now, None to let it continue."""
        self._see(look)
        if look.disk_full:
            return self._full(look)
        complete = self._all("complete")
        if complete and not self._silent:
            return self._complete()
        quiet = look.now_s - self._changed_s >= self._request.stable_for_s
        if self._records and quiet and (complete or self._request.until == "stable"):
            reason = f"no new record for {self._request.stable_for_s:g} s"
            return self._complete(reason) if complete else Ending("stable", reason)
        if look.daemon_ended:
            return Ending("daemon", "the daemon ended before the job")
        if self._request.timeout_s and look.now_s - self._began_s >= self._request.timeout_s:
            return Ending("timeout", f"not complete after {self._request.timeout_s:g} s (--timeout)")
        return None

    def over(self, look: Observation, asked: Ending | None, code: int) -> Ending:
        """Decide how the job ended, after all its captures have arrived.

        `asked` is the reason for which the job was ended, None if it ended by itself.
        """
        self._see(look)
        ending = self._by_itself(code) if asked is None else asked
        if ending.outcome in (*COLLECTED, "incomplete"):
            if look.daemon_ended:
                return Ending(
                    "daemon", f"{ending.reason}, but the daemon no longer says how many captures were stored"
                )
            if not self._records:
                return Ending("nothing", f"{ending.reason}, and nothing was captured")
            if look.disk_full:
                return self._full(look)
        if look.lost:
            return Ending(ending.outcome, f"{ending.reason}; {look.lost:,} captures were dropped")
        return ending

    def _by_itself(self, code: int) -> Ending:
        if code != 0:
            return Ending("failed", f"the job ended with exit code {code}")
        if self._all("complete", "reached"):
            return self._complete()
        if self._ranks and self._records and self._request.micro_batches:
            return Ending(
                "incomplete",
                f"the job ended with {self.micro_batches} of {self._request.micro_batches} micro-batches; let it train "
                "longer, or lower --control-iter",
            )
        return Ending("ended", "the job ended by itself")

    def _see(self, look: Observation) -> None:
        if look.records != self._records:
            self._records, self._changed_s = look.records, look.now_s
        self._ranks = _farthest(look.ranks)
        count = max((one.local_world_size for one in self._ranks), default=0)
        self._silent = max(0, count - len(self._ranks))
        self.micro_batches = min((one.kept for one in self._ranks), default=0)

    def _all(self, *states: QuotaState) -> bool:
        return bool(self._ranks) and all(one.state in states for one in self._ranks)

    def _full(self, look: Observation) -> Ending:
        reason = f"the space is used up: {look.why_full or 'max_disk, keep_free or the disk itself'}"
        return Ending("full" if self._request.micro_batches else "ended", reason)

    def _complete(self, *reasons: str) -> Ending:
        count, known = self._request.micro_batches, len(self._ranks)
        whose = "each rank"
        if self._silent:
            whose = f"{known} of {known + self._silent} ranks (the rest captures nothing)"
        kept = f"{count} micro-batch{'' if count == 1 else 'es'} of {whose}"
        return Ending("complete", ", ".join((kept, *reasons)))


def _farthest(ranks: Sequence[Collected]) -> list[Collected]:
    """Return the process of each rank with the most progress, because a launcher may have restarted a rank."""
    order = ("collecting", "reached", "complete")
    found: dict[int, Collected] = {}
    for one in sorted(ranks, key=lambda one: (order.index(one.state), one.kept)):
        found[one.rank] = one
    return list(found.values())
