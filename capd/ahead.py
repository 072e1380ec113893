"""Work that starts before its results are needed, in order and within a limit of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["AHEAD_NBYTES", "ahead", "worker_threads"]

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
    """Call `begin` on items in order before their results are needed. Yield each item with its result.

    Args:
        items: The items.
        begin: Starts the work of an item. Its exceptions are raised here.
        nbytes: Returns the memory that an item needs.
        limit_nbytes: The limit for all started items, which are also at most 64. An item counts until the consumer
            asks for the next one. An item above the limit is started when it is alone.
    """
    waiting: deque[tuple[Item, Begun, int]] = deque()
    held = 0
    for item in items:
        cost = nbytes(item)
        while waiting and (held + cost > limit_nbytes or len(waiting) >= _MOST_ITEMS):
            first, begun, taken = waiting.popleft()
            yield first, begun
            # The consumer has finished with them. Their memory must be free before more work starts.
            del first, begun
            held -= taken
        waiting.append((item, begin(item), cost))
        held += cost
    while waiting:
        first, begun, _ = waiting.popleft()
        yield first, begun
        del first, begun


@contextmanager
def worker_threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Run threads while the block runs. Work that has not started at its end is cancelled."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=f"capd-{name}")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
