"""Work begun ahead of whoever takes its results in order, within a limit of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["AHEAD_NBYTES", "ahead"]

AHEAD_NBYTES = 128 << 20
_MOST_ITEMS = 64

Item = TypeVar("Item")
Begun = TypeVar("Begun")


def ahead(
    items: Iterable[Item],
    begin: Callable[[Item], Begun],
    nbytes: Callable[[Item], int],
    limit_nbytes: int = AHEAD_NBYTES,
) -> Iterator[tuple[Item, Begun]]:
    """Call `begin` on items in order, up to `limit_nbytes` or 64 items before the one that is taken, and hand both on.

    An item counts until the next one is asked for; one beyond the limit waits until it is alone. What `begin` raises
    is raised here.
    """
    waiting: deque[tuple[Item, Begun, int]] = deque()
    held = 0
    for item in items:
        cost = nbytes(item)
        while waiting and (held + cost > limit_nbytes or len(waiting) >= _MOST_ITEMS):
            first, begun, taken = waiting.popleft()
            yield first, begun
            del first, begun  # the consumer is done with them: their memory is free before more is begun
            held -= taken
        waiting.append((item, begin(item), cost))
        held += cost
    while waiting:
        first, begun, _ = waiting.popleft()
        yield first, begun
        del first, begun
