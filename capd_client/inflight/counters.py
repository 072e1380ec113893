"""Exact accounting of one rank: the counter words, and the ledger of drops by key and reason.

The words live in the arena's counter page, where the daemon reads them after the rank is dead; before there is
an arena, and after it is gone, they are a plain list. Every method is called under the session's lock, which is
what makes `offered = committed + dropped + in flight` hold whenever the lock is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

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
    """The words of the counter page. `words` may be written directly on the capture path."""

    __slots__ = ("words",)

    def __init__(self) -> None:
        self.words: Union[list[int], memoryview] = [0] * _WORDS

    def attach(self, page: memoryview) -> None:
        """Move into the counter page, a writable view of u64 words; the magic is written last."""
        for index in range(1, _WORDS):
            page[index] = self.words[index]
        page[0] = COUNTER_MAGIC
        self.words = page

    def detach(self) -> None:
        """Move back into plain memory: the arena is about to be unmapped."""
        self.words = [int(word) for word in self.words[:_WORDS]]

    def reset(self) -> None:
        """Start from zero in plain memory without touching the page (a forked child cannot)."""
        self.words = [0] * _WORDS

    def snapshot(self) -> CounterValues:
        """All counters; `dropped` holds the reasons that occurred."""
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
    """Cumulative drops per (key id, reason), and which rows the daemon has not been told yet."""

    __slots__ = ("_changed", "_rows")

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], DropRow] = {}
        self._changed: dict[tuple[int, int], None] = {}  # an ordered set

    def add(self, key_id: int, reason: DropReason, nbytes: int, iteration: int) -> None:
        """Count one drop of a key."""
        at = (key_id, REASON_INDEX[reason])
        row = self._rows.get(at)
        if row is None:
            self._rows[at] = DropRow(key_id, at[1], 1, nbytes, iteration, iteration)
        else:
            row.count += 1
            row.nbytes += nbytes
            if iteration > row.last_iteration:  # min and max would cost as much as the rest
                row.last_iteration = iteration
            elif iteration < row.first_iteration:
                row.first_iteration = iteration
        self._changed[at] = None

    @property
    def changed(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._changed)

    def take(self, limit: int) -> list[DropRow]:
        """Up to `limit` changed rows, copied, now regarded as told."""
        rows: list[DropRow] = []
        while self._changed and len(rows) < limit:
            row = self._rows[self._changed.popitem()[0]]
            rows.append(
                DropRow(
                    row.key_id, row.reason, row.count, row.nbytes, row.first_iteration, row.last_iteration
                )
            )
        return rows

    def forget_told(self) -> None:
        """Regard every row as changed: a new connection's peer may know none of them."""
        self._changed = dict.fromkeys(self._rows)

    def row(self, key_id: int, reason: DropReason) -> Optional[DropRow]:
        """One row, for tests and tools."""
        return self._rows.get((key_id, REASON_INDEX[reason]))
