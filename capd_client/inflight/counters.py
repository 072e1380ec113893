"""The counters of one rank: the counter words, and the ledger of drops by key and reason.

The words are in the arena's counter page, so the daemon can read them after the rank has died. Before the arena
exists, and after it is gone, they are a plain list. The caller of every method holds the session's lock. So
`offered = committed + dropped + in flight` is true whenever the lock is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from msgspec.structs import replace

from capd_client.protocol.counter_page import (
    COUNTER_ACKED,
    COUNTER_DROPS,
    COUNTER_IN_FLIGHT,
    COUNTER_MAGIC,
    COUNTER_OFFERED,
    COUNTER_STEPS,
    DROP_REASONS,
    DropReason,
)
from capd_client.protocol.messages import DropRow

__all__ = ["REASON_INDEX", "CounterValues", "Counters", "Ledger"]

REASON_INDEX: dict[DropReason, int] = {reason: index for index, reason in enumerate(DROP_REASONS)}
_WORDS = COUNTER_STEPS + 1


@dataclass(frozen=True)
class CounterValues:
    """The counters at one instant."""

    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]


class Counters:
    """The words of the counter page. The capture path writes `words` directly."""

    __slots__ = ("words",)

    def __init__(self) -> None:
        self.words: Union[list[int], memoryview] = [0] * _WORDS

    def attach(self, page: memoryview) -> None:
        """Move into the counter page, a writable view of u64 words. The magic is written last."""
        for index in range(1, _WORDS):
            page[index] = self.words[index]
        page[0] = COUNTER_MAGIC
        self.words = page

    def detach(self) -> None:
        """Move back into plain memory, before the arena is unmapped."""
        self.words = [int(word) for word in self.words[:_WORDS]]

    def reset(self) -> None:
        """Start from zero in plain memory. The page is not touched, because a forked child cannot access it."""
        self.words = [0] * _WORDS

    def snapshot(self) -> CounterValues:
        """Return all counters. `dropped` holds only the reasons that occurred."""
        words = self.words
        dropped = {
            reason.value: int(words[COUNTER_DROPS + index])
            for index, reason in enumerate(DROP_REASONS)
            if words[COUNTER_DROPS + index]
        }
        return CounterValues(
            offered=int(words[COUNTER_OFFERED]),
            committed=int(words[COUNTER_ACKED]),
            in_flight=int(words[COUNTER_IN_FLIGHT]),
            dropped=dropped,
        )


class Ledger:
    """The cumulative drops per (key id, reason), and the rows that the daemon does not have yet."""

    __slots__ = ("_changed", "_rows")

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], DropRow] = {}
        # Used as an ordered set.
        self._changed: dict[tuple[int, int], None] = {}

    def add(self, key_id: int, reason: DropReason, nbytes: int, iteration: int) -> None:
        """Count one drop of a key."""
        at = (key_id, REASON_INDEX[reason])
        row = self._rows.get(at)
        if row is None:
            self._rows[at] = DropRow(key_id, at[1], 1, nbytes, iteration, iteration)
        else:
            row.count += 1
            row.nbytes += nbytes
            # `min` and `max` would cost as much as the rest of the method.
            if iteration > row.last_iteration:
                row.last_iteration = iteration
            elif iteration < row.first_iteration:
                row.first_iteration = iteration
        self._changed[at] = None

    @property
    def changed(self) -> bool:
        """Whether the daemon lacks some rows."""
        return bool(self._changed)

    def take(self, limit: int) -> list[DropRow]:
        """Return copies of up to `limit` changed rows, and regard them as reported."""
        rows: list[DropRow] = []
        while self._changed and len(rows) < limit:
            rows.append(replace(self._rows[self._changed.popitem()[0]]))
        return rows

    def forget_reported(self) -> None:
        """Regard every row as changed, because the peer of a new connection may know none of them."""
        self._changed = dict.fromkeys(self._rows)

    def row(self, key_id: int, reason: DropReason) -> Optional[DropRow]:
        """Return one row, for tests and tools."""
        return self._rows.get((key_id, REASON_INDEX[reason]))
