"""The figures of uploads: counted by the threads that upload, read by statistics, metrics and progress lines."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from capd.store.objects.failures import REASONS

__all__ = ["UploadCounters", "UploadFigures"]


@dataclass(frozen=True, slots=True)
class UploadCounters:
    """The figures at one moment.

    Attributes:
        objects: The objects that were written.
        nbytes: Their bytes.
        failures: The rounds that failed, by reason.
        backlog_nbytes: The bytes of sealed shards that no manifest in the object store names.
        oldest_s: The age of the oldest of them; 0 without one.
    """

    objects: int = 0
    nbytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    backlog_nbytes: int = 0
    oldest_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    nbytes: int
    since_s: float


class UploadFigures:
    """The counters of all uploads of a process. Any thread may use them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._objects = self._nbytes = 0
        self._failures: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._waiting: dict[str, _Waiting] = {}

    def wrote(self, run: str, nbytes: int, *, is_shard: bool) -> None:
        """Count an object of a run."""
        with self._lock:
            self._objects += 1
            self._nbytes += nbytes
        if is_shard:
            self.skipped(run, nbytes)

    def skipped(self, run: str, nbytes: int) -> None:
        """Note that bytes of a run wait no longer."""
        with self._lock:
            if (waiting := self._waiting.get(run)) is not None:
                waiting.nbytes = max(0, waiting.nbytes - nbytes)

    def failed(self, reason: str) -> None:
        """Count a round that failed."""
        with self._lock:
            self._failures[reason if reason in REASONS else "other"] += 1

    def waits(self, run: str, nbytes: int, since_s: float) -> None:
        """Set what waits of a run: the bytes of its shards, and the time of the oldest change since 1970."""
        with self._lock:
            self._waiting[run] = _Waiting(nbytes, since_s)

    def settled(self, run: str) -> None:
        """Note that nothing of a run waits."""
        with self._lock:
            self._waiting.pop(run, None)

    def read(self) -> UploadCounters:
        """Return the figures of this moment."""
        with self._lock:
            now = self._clock()
            oldest = min((one.since_s for one in self._waiting.values()), default=now)
            backlog = sum(one.nbytes for one in self._waiting.values())
            return UploadCounters(
                self._objects, self._nbytes, dict(self._failures), backlog, max(0.0, now - oldest)
            )
