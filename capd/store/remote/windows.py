"""The windows of objects that were read: bounded in memory, fetched together, and kept for the next reader."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from capd.store.objects.bucket import Bucket

__all__ = ["Span", "WindowCache", "joined"]

# Start and end in an object.
Span = tuple[int, int]

_CACHE_NBYTES = 256 << 20
_AT_ONCE = 16
# A request costs as much time as the transfer of about 1 MiB.
_GAP_NBYTES = 1 << 20
_WINDOW_NBYTES = 16 << 20


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return windows that cover all spans. Neighbours become one window, as long as it is not large."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= _GAP_NBYTES and end - found[-1][0] <= _WINDOW_NBYTES:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif not found or end > found[-1][1]:
            found.append((start, end))
    return found


class WindowCache:
    """The windows that a run's readers fetched last, at most 256 MiB. Any thread may use it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        # Several readers share the limit.
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self._held: OrderedDict[tuple[Hashable, Span], bytes] = OrderedDict()
        self._spans: dict[Hashable, list[Span]] = {}
        self._nbytes = 0

    def find(self, owner: Hashable, span: Span) -> tuple[int, bytes] | None:
        """Return the start and the bytes of a window of an object that holds a span; None if there is none."""
        with self._lock:
            for held in self._spans.get(owner, ()):
                if held[0] <= span[0] and span[1] <= held[1]:
                    self._held.move_to_end((owner, held))
                    return held[0], self._held[owner, held]
        return None

    def put(self, owner: Hashable, start: int, payload: bytes) -> None:
        """Keep a window."""
        span = (start, start + len(payload))
        with self._lock:
            if (owner, span) in self._held or len(payload) > _CACHE_NBYTES // 2:
                return
            self._held[owner, span] = payload
            self._spans.setdefault(owner, []).append(span)
            self._nbytes += len(payload)
            while self._nbytes > _CACHE_NBYTES:
                (other, gone), dropped = self._held.popitem(last=False)
                self._spans[other].remove(gone)
                if not self._spans[other]:
                    del self._spans[other]
                self._nbytes -= len(dropped)

    def fetch(self, owner: Hashable, key: str, spans: Sequence[Span]) -> list[tuple[int, bytes]]:
        """Return the windows of an object with some spans. Those that are not kept are fetched, several at once.

        Raises:
            ObjectStoreError: They cannot be read.
        """
        found: list[tuple[int, bytes]] = []
        wanted: list[Span] = []
        for span in spans:
            held = self.find(owner, span)
            if held is None:
                wanted.append(span)
            else:
                found.append(held)
        windows = joined(wanted)
        if len(windows) <= 1:
            return found + [self._get(owner, key, window) for window in windows]
        with ThreadPoolExecutor(min(_AT_ONCE, len(windows)), thread_name_prefix="capd-get") as pool:
            return found + list(pool.map(lambda window: self._get(owner, key, window), windows))

    def _get(self, owner: Hashable, key: str, window: Span) -> tuple[int, bytes]:
        with self._slots:
            payload = self._bucket.get_range(key, *window)
        self.put(owner, window[0], payload)
        return window[0], payload
