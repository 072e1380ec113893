"""The numbers of calls: how often something was captured before in a micro-batch."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

__all__ = ["CallNumbers"]

# The micro-batches whose call ordinals are remembered.
_REMEMBERED = 64


class CallNumbers:
    """The counters of explicit captures and scalars, for the newest 64 micro-batches.

    No two threads get the same number, because each step of `next` is atomic in the interpreter.
    """

    def __init__(self) -> None:
        self._counters: OrderedDict[tuple[int, int], dict[object, count[int]]] = OrderedDict()
        # The newest entry of `_counters`: its moment, and its counters.
        self._newest: tuple[tuple[int, int], dict[object, count[int]]] = ((-1, -1), {})

    def next(self, identity: object, iteration: int, micro_batch: int) -> int:
        """Return how often `identity` was counted before in this micro-batch: 0, 1, 2, …"""
        moment, calls = self._newest
        if moment[0] != iteration or moment[1] != micro_batch:
            calls = self._counters.setdefault((iteration, micro_batch), {})
            self._newest = ((iteration, micro_batch), calls)
            if len(self._counters) > _REMEMBERED:
                self._counters.popitem(last=False)
        counter = calls.get(identity)
        if counter is None:
            counter = calls.setdefault(identity, count())
        return next(counter)

    def has(self, identity: object, iteration: int) -> bool:
        """Return whether `identity` was counted in this iteration."""
        each = tuple(self._counters.items())
        return any(identity in calls for (of, _), calls in each if of == iteration)
