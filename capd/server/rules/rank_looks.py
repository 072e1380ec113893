"""Looks at the ranks for rules: how long one has been silent, and how many captures it lost within a minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from capd.drops import lost
from capd.server.runs.registry import Registry

__all__ = ["RankLook", "RankLooks"]

WINDOW_S = 60.0


class RankLook(NamedTuple):
    """What is known of a live rank. silent: seconds. drops: the captures lost within WINDOW_S."""

    run_id: str
    rank: int
    attempt: int
    iteration: int
    silent: float
    drops: int


@dataclass(slots=True)
class _Seen:
    """A rank at the last look. The drops before the first look count as lost before."""

    progress: tuple[int, int]
    since: float
    # Pairs of time and all lost captures by then.
    losses: deque[tuple[float, int]] = field(default_factory=deque)


class RankLooks:
    """Looks at all live ranks of a registry. One thread has it."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without a look."""
        self._registry, self._clock = registry, clock
        self._seen: dict[bytes, _Seen] = {}

    def look(self) -> Iterator[RankLook]:
        """Yield each rank that is here, or may come back."""
        now, before = self._clock(), self._seen
        self._seen = {}
        for run in self._registry.runs():
            for rank in run.alive():
                _, totals = rank.totals()
                begun = rank.begun
                losses = sum(lost({reason.value: count for reason, count in totals.dropped.items()}).values())
                progress = (begun, totals.offered)
                seen = before.get(rank.client) or _Seen(progress, now, deque([(now, losses)]))
                if seen.progress != progress:
                    seen.progress, seen.since = progress, now
                if seen.losses[-1][1] != losses:
                    seen.losses.append((now, losses))
                while len(seen.losses) > 1 and seen.losses[1][0] <= now - WINDOW_S:
                    seen.losses.popleft()
                self._seen[rank.client] = seen
                yield RankLook(
                    run.run_id,
                    rank.hello.rank,
                    rank.hello.attempt + rank.shift,
                    max(0, begun - 1),
                    now - seen.since,
                    losses - seen.losses[0][1],
                )
