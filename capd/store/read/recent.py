"""The LRU cache: a bounded mapping that several threads may share without a lock."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping of at most `limit` values. If two threads miss the same key, both compute it and the later value stays.

    Every step is a single dictionary operation. So a forked child finds the mapping usable at any time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Return the value of `key` and count it as used now; None if it is missing."""
        value = self._values.get(key)
        if value is not None:
            # Another thread may have removed it in the meantime.
            with contextlib.suppress(KeyError):
                self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Store a value. If there are too many, remove the least recently used one."""
        self._values[key] = value
        with contextlib.suppress(KeyError):
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
