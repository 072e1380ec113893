"""A bounded mapping that forgets what was used least recently. Several threads may share one without a lock."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Holds at most `limit` values. Two threads that miss the same key both make its value; the later one stays.

    Every step is a single dictionary operation, so a child forked in the middle of one finds it usable.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value of `key`, which counts as used now, or None."""
        value = self._values.get(key)
        if value is not None:
            with contextlib.suppress(KeyError):  # another thread forgot it meanwhile
                self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Remember a value; the least recently used one goes if there are too many."""
        self._values[key] = value
        with contextlib.suppress(KeyError):
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
