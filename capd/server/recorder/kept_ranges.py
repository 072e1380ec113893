"""The kept iterations of one attempt: disjoint ranges, each with the keep that asked for it first. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import NamedTuple

__all__ = ["KeptRange", "KeptRanges"]


class KeptRange(NamedTuple):
    """Iterations that are kept, and why: the reason and the iteration of the keep."""

    first: int
    last: int
    reason: str
    iteration: int


class KeptRanges:
    """The ranges of one attempt. A keep adds only what no earlier one covers."""

    def __init__(self) -> None:
        self._ranges: list[KeptRange] = []

    def find(self, iteration: int) -> KeptRange | None:
        """Return the range with an iteration; None if it is not kept."""
        at = bisect_right(self._ranges, iteration, key=lambda one: one.first) - 1
        return self._ranges[at] if at >= 0 and iteration <= self._ranges[at].last else None

    def covers(self, first: int, last: int) -> bool:
        """Return whether every iteration of a range is kept."""
        return not self._missing(KeptRange(first, last, "", first))

    def add(self, new: KeptRange) -> bool:
        """Add a range. Return whether it covers an iteration that was not kept."""
        pieces = self._missing(new)
        self._ranges = sorted([*self._ranges, *pieces])
        return bool(pieces)

    def _missing(self, new: KeptRange) -> list[KeptRange]:
        pieces, at = [], new.first
        start = max(0, bisect_right(self._ranges, at, key=lambda one: one.first) - 1)
        for known in itertools.islice(self._ranges, start, None):
            if known.first > new.last:
                break
            if known.last < at:
                continue
            if known.first > at:
                pieces.append(new._replace(first=at, last=known.first - 1))
            at = known.last + 1
        if at <= new.last:
            pieces.append(new._replace(first=at))
        return pieces
