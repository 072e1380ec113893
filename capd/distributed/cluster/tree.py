"""A tree of merges. Each result enters it once, so no retry counts twice."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FAN_IN", "Group", "MergeTree"]

FAN_IN = 8


class Group(NamedTuple):
    """Neighbours that can be merged now: the level and the place of their merge, and what is merged."""

    level: int
    place: int
    results: list[bytes]


class MergeTree:
    """Tells which neighbours can be merged, `FAN_IN` at a time. It keeps no result that was merged.

    Attributes:
        root: The result of all leaves, once it is there.
    """

    def __init__(self, leaves: int) -> None:
        """Begin a tree that gets so many results."""
        # The number of results of each level, leaves first.
        self._sizes = [leaves]
        while self._sizes[-1] > 1:
            self._sizes.append(-(-self._sizes[-1] // FAN_IN))
        self._waiting: dict[tuple[int, int], dict[int, bytes]] = {}
        self._seen: set[tuple[int, int]] = set()
        self.root: bytes | None = None

    def add(self, level: int, place: int, result: bytes) -> Group | None:
        """Add the result of a leaf (level 0) or of a merge. What is added twice counts once.

        Returns:
            The neighbours that can be merged now, or None.
        """
        if (level, place) in self._seen:
            return None
        self._seen.add((level, place))
        if self._sizes[level] == 1:
            self.root = result
            return None
        group = place // FAN_IN
        results = self._waiting.setdefault((level, group), {})
        results[place] = result
        if len(results) < min(FAN_IN, self._sizes[level] - group * FAN_IN):
            return None
        del self._waiting[level, group]
        if len(results) == 1:
            return self.add(level + 1, group, result)
        return Group(level + 1, group, [results[one] for one in sorted(results)])
