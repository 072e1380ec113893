"""A tree of merges on the workers. Each result enters it once, so no retry counts twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["FAN_IN", "MergeTree"]

FAN_IN = 8
Node = TypeVar("Node")


class MergeTree(Generic[Node]):
    """Merges neighbours, `FAN_IN` at a time, as soon as all of them are there."""

    def __init__(self, leaves: int, merge: Callable[[list[Node]], Node]) -> None:
        """Begin without results.

        Args:
            leaves: The number of results that will be added.
            merge: Begins the merge of neighbours, and returns what will be their result.
        """
        self._merge = merge
        # The number of nodes of each level, leaves first.
        self._sizes = [leaves]
        while self._sizes[-1] > 1:
            self._sizes.append(-(-self._sizes[-1] // FAN_IN))
        self._waiting: dict[tuple[int, int], dict[int, Node]] = {}
        self.root: Node | None = None

    def add(self, leaf: int, node: Node) -> None:
        """Add the result of a leaf. A second one for the same leaf is left out."""
        self._add(0, leaf, node)

    def _add(self, level: int, at: int, node: Node) -> None:
        if self._sizes[level] == 1:
            self.root = node
            return
        group = at // FAN_IN
        nodes = self._waiting.setdefault((level, group), {})
        nodes.setdefault(at, node)
        if len(nodes) == min(FAN_IN, self._sizes[level] - group * FAN_IN):
            self._waiting[level, group] = {}
            ordered = [nodes[one] for one in sorted(nodes)]
            self._add(level + 1, group, self._merge(ordered) if len(ordered) > 1 else ordered[0])
