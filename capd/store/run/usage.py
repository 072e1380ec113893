"""The use of a run's quotas on one node: bytes of the run, of each rank and of each series, against their limits.

The bytes are those of shard files, and for small records that wait in the log the bytes that they take uncompressed.
The catalog holds both, so a restarted daemon counts on from where the last one was. A quota is about what a run
captures: what was moved to an object store counts, too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from capd.errors import QuotaReached
from capd.space import shown_size
from capd.store.shards.series import Plan, SeriesState

__all__ = ["NEAR", "Quota", "QuotaUsage", "Use"]

logger = logging.getLogger(__name__)

NEAR = 0.9
"""The share of a limit from which only statistics are kept."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of each run on this node, in bytes; None for no limit.

    Attributes:
        keeps_statistics: From NEAR of a limit on, only the statistics of tensors are kept.
    """

    run_max: int | None = None
    rank_max: int | None = None
    series_max: int | None = None
    keeps_statistics: bool = True


class Use(NamedTuple):
    """The use of one limit. of: the rank or the series that uses it, "" for the run."""

    limit: str
    of: str
    used: int
    max: int


class QuotaUsage:
    """The bytes of a run on one node. Owned by the append thread, except for `is_near`, `near` and `uses`."""

    def __init__(self, quota: Quota, run: str, known: Iterable[SeriesState]) -> None:
        """Count the series that the run has."""
        self._quota, self._name = quota, run
        self._has_limits = any(one is not None for one in (quota.run_max, quota.rank_max, quota.series_max))
        self._run = 0
        self._ranks: dict[int, int] = {}
        self._series: dict[str, int] = {}
        # The limits that the log has named, once near and once reached.
        self._said: set[tuple[str, str, str]] = set()
        for series in known:
            self.note(series)

    def note(self, series: SeriesState) -> None:
        """Count the present bytes of a series."""
        if not self._has_limits:
            return
        path, rank = series.header.path, series.header.key.rank
        held = series.row.stored_bytes + len(series.waiting) * series.geometry.record_nbytes
        added = held - self._series.get(path, 0)
        self._series[path] = held
        self._run += added
        self._ranks[rank] = self._ranks.get(rank, 0) + added

    def check(self, records: Iterable[tuple[Plan, int]]) -> None:
        """Check that records fit into all limits. nbytes: the raw bytes of each.

        Raises:
            QuotaReached: One does not fit. The message names the limit and the remedy.
        """
        if not self._has_limits:
            return
        new: dict[tuple[str, str], int] = {}
        for plan, nbytes in records:
            needed = _needed(plan, nbytes)
            for use in self._of(plan):
                at = (use.limit, use.of)
                new[at] = new.get(at, 0) + needed
                if use.used + new[at] > use.max:
                    if use.used + needed > use.max:
                        self._say_once(
                            "reached", use, "has reached its limit: its records are dropped from now on"
                        )
                    raise QuotaReached(self._refusal(use, needed))

    def is_near(self, plan: Plan, nbytes: int) -> bool:
        """Return whether only statistics of a record are to be kept: a limit is near, or cannot hold its raw bytes."""
        return self.near([(plan, nbytes)])[0]

    def near(self, records: Sequence[tuple[Plan, int]]) -> list[bool]:
        """Return `is_near` for each of the records of one write, in which those before it count as stored."""
        if not (self._has_limits and self._quota.keeps_statistics):
            return [False] * len(records)
        ahead: Counter[tuple[str, str]] = Counter()
        found = []
        for plan, nbytes in records:
            needed = _needed(plan, nbytes)
            uses = [use._replace(used=use.used + ahead[use.limit, use.of]) for use in self._of(plan)]
            found.append(any(self._leaves_statistics(use, needed) for use in uses))
            if not found[-1]:
                ahead.update({(use.limit, use.of): needed for use in uses})
        return found

    def _leaves_statistics(self, use: Use, needed: int) -> bool:
        if use.used >= NEAR * use.max:
            self._say_once("near", use, "is near its limit: only statistics are kept from now on")
            return True
        if use.used + needed > use.max:
            self._say_once(
                "large",
                use,
                f"has no room for a record of {shown_size(needed)}: only its statistics are kept",
            )
            return True
        return False

    def uses(self) -> list[Use]:
        """Return the use of each limit, by its fullest rank and series."""
        found: list[Use] = []
        quota = self._quota
        if quota.run_max is not None:
            found.append(Use("run_max", "", self._run, quota.run_max))
        if quota.rank_max is not None and (ranks := dict(self._ranks)):
            rank = max(ranks, key=lambda one: ranks[one])
            found.append(Use("rank_max", f"rank {rank}", ranks[rank], quota.rank_max))
        if quota.series_max is not None and (series := dict(self._series)):
            path = max(series, key=lambda one: series[one])
            found.append(Use("series_max", path, series[path], quota.series_max))
        return found

    def _of(self, plan: Plan) -> list[Use]:
        quota, rank = self._quota, plan.header.key.rank
        path = plan.header.path if plan.series is not None else ""
        found = []
        if quota.run_max is not None:
            found.append(Use("run_max", "", self._run, quota.run_max))
        if quota.rank_max is not None:
            found.append(Use("rank_max", f"rank {rank}", self._ranks.get(rank, 0), quota.rank_max))
        if quota.series_max is not None:
            held = self._series.get(path, 0)
            found.append(Use("series_max", path or plan.header.path, held, quota.series_max))
        return found

    def _refusal(self, use: Use, nbytes: int) -> str:
        whose = use.of or f"run {self._name}"
        return (
            f"{use.limit} refuses a record of {shown_size(nbytes)}: {whose} holds {shown_size(use.used)} of the "
            f"{shown_size(use.max)} that it may have on this node; raise CAPD_{use.limit.upper()} "
            f"({use.limit} in [quota]), or write to another run"
        )

    def _say_once(self, what: str, use: Use, then: str) -> None:
        if (what, use.limit, use.of) not in self._said:
            self._said.add((what, use.limit, use.of))
            logger.warning(
                "run %s: %s %s (%s of %s, %s in [quota])",
                self._name, use.of or "it", then, shown_size(use.used), shown_size(use.max), use.limit,
            )  # fmt: skip


def _needed(plan: Plan, nbytes: int) -> int:
    """Return the bytes that a record of `nbytes` raw bytes takes at most, but for its frames."""
    return plan.geometry.record_nbytes if plan.is_small else nbytes
