"""How many micro-batches a collection run keeps: N in all, at most M of one iteration. No torch."""

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
    """What one process of a collection run's job leaves about itself. kept: micro-batches that were taken."""

    rank: int
    local_world_size: int
    host: str
    pid: int
    kept: int
    state: QuotaState


def parse_quota(text: str) -> tuple[Optional[int], int]:
    """N and M of "N/M"; N is None for "all". Raises ConfigError saying what is accepted."""
    match = _QUOTA.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f'{text!r} is not "N/M": N micro-batches in all ("all" for every one), at most M of an iteration'
        )
    return (None if match[1] == "all" else int(match[1])), int(match[2])


class Quota:
    """Which micro-batches of a job are taken: of each iteration the first M that come, until they are N in all.

    total: N, None for no end. Counted from the first iteration that is asked about, whatever its number is: a job that
    resumes has its N, too, and so has one with fewer than M micro-batches per iteration. All ranks of a job see the
    same micro-batches, so they take the same ones without talking to each other. Not thread-safe: the thread that
    trains asks. on_change: called when a micro-batch is taken for the first time, and when the quota is complete.
    """

    def __init__(
        self, total: Optional[int], per_iteration: int, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._total = total
        self._per_iteration = per_iteration
        self._on_change = on_change
        self._before = 0  # taken of the iterations before this one
        self._iteration = -1
        self._taken: set[int] = set()  # micro-batches of this iteration
        self._complete = False
        self.watched = False  # whether gates ask, by the iterations that capd counts

    @property
    def kept(self) -> int:
        """Micro-batches taken until now."""
        return self._before + len(self._taken)

    @property
    def state(self) -> QuotaState:
        """reached: all N are taken, but the iteration of the last one, and so its backward, may be under way."""
        if self._complete:
            return "complete"
        return "collecting" if self.kept != self._total else "reached"

    def room(self, iteration: int) -> int:
        """How many micro-batches of this iteration are taken."""
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
        """Whether this micro-batch is taken; it is, as long as there is room."""
        room = self.room(iteration)
        if micro_batch not in self._taken:
            if len(self._taken) >= room:
                return False
            self._taken.add(micro_batch)
            self._on_change()
        return True
