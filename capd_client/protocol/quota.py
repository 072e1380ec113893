"""The quota of a collection run: it keeps N micro-batches in all, at most M of one iteration. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, Optional

import msgspec

from capd_client.errors import ConfigError

__all__ = ["Collected", "Quota", "QuotaState", "parse_quota"]

_QUOTA = re.compile(r"(all|[1-9][0-9]{0,8})/([1-9][0-9]{0,8})")

QuotaState = Literal["collecting", "reached", "complete"]


class Collected(msgspec.Struct, kw_only=True):
    """The report of one process of a collection run's job. `kept` is the number of micro-batches taken."""

    rank: int
    local_world_size: int
    host: str
    pid: int
    kept: int
    state: QuotaState


def parse_quota(text: str) -> tuple[Optional[int], int]:
    """Return N and M of "N/M"; N is None for "all". Raises ConfigError saying what is accepted."""
    match = _QUOTA.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f'{text!r} is not "N/M": N micro-batches in all ("all" for every one), at most M of an iteration'
        )
    return (None if match[1] == "all" else int(match[1])), int(match[2])


class Quota:
    """The micro-batches that a job takes: the first M of each iteration, until there are N in all.

    Counting starts at the first iteration that is asked about, whatever its number is. A resumed job therefore gets its
    N too, and so does a job with fewer than M micro-batches per iteration. All ranks of a job see the same
    micro-batches, so they take the same ones without communication. Not thread-safe: only the training thread asks.

    Args:
        total: N; None has no end.
        per_iteration: M.
        on_change: Called when a micro-batch is taken for the first time, and when the quota is complete.
    """

    def __init__(
        self, total: Optional[int], per_iteration: int, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._total = total
        self._per_iteration = per_iteration
        self._on_change = on_change
        # Micro-batches taken of earlier iterations, and of this one.
        self._before = 0
        self._iteration = -1
        self._taken: set[int] = set()
        self._complete = False
        # Whether gates ask, with iterations that capd counts.
        self.watched = False

    @property
    def kept(self) -> int:
        """The number of micro-batches taken until now."""
        return self._before + len(self._taken)

    @property
    def state(self) -> QuotaState:
        """The state: "reached" once all N are taken; "complete" after the iteration of the last one."""
        if self._complete:
            return "complete"
        return "collecting" if self.kept != self._total else "reached"

    def room(self, iteration: int) -> int:
        """Return how many micro-batches of this iteration may be taken."""
        if iteration != self._iteration:
            self._before += len(self._taken)
            self._iteration, self._taken = iteration, set()
            if self._before == self._total and not self._complete:
                self._complete = True
                self._on_change()
        if self._total is None:
            return self._per_iteration
        return min(self._per_iteration, self._total - self._before)

    def take(self, iteration: int, micro_batch: int) -> bool:
        """Take this micro-batch if there is room; return whether it is taken."""
        room = self.room(iteration)
        if micro_batch not in self._taken:
            if len(self._taken) >= room:
                return False
            self._taken.add(micro_batch)
            self._on_change()
        return True
