"""The page lock of a rank's arena for its GPUs. It grows with the arena, in a thread for which nobody waits."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Optional

import torch

from capd_client.arena.arena import STEP_NBYTES, Arena
from capd_client.device.cuda.runtime import pin, unpin
from capd_client.process.log import RateLimitedLog

__all__ = ["CHUNK_NBYTES", "Pinning"]

# Nothing can stop a registration.
_JOIN_S = 1.0
CHUNK_NBYTES = 128 << 20
# Linux 6.11 to 6.13 refuse 2 GB at once, however much memory there is.
_MAX_CHUNK_NBYTES = 2 * 10**9 // STEP_NBYTES * STEP_NBYTES


class Pinning:
    """The page lock of `arena`, in parts that are usable as soon as they are locked.

    A copy may not cross from one part into another (`part_end`). Copies to memory that is not locked take another way,
    which is slower.

    A part has at most `chunk_nbytes` (a multiple of STEP_NBYTES). After it comes a pause as long as its locking took.
    While the driver locks pages, it holds locks for which other threads and other ranks of the node wait.
    """

    def __init__(self, arena: Arena, notices: RateLimitedLog, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._arena = arena
        self._notices = notices
        self._chunk_nbytes = min(chunk_nbytes, _MAX_CHUNK_NBYTES)
        # Re-entrant, because a signal handler of the job may close the session.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None
        # The thread does not exist yet, or has nothing left to do.
        self._settled = True
        self._release: Optional[Callable[[], None]] = None
        self._device: Optional[torch.device] = None
        self._registering = False
        # The ends of the parts. Each part begins at the end of the part before it.
        self._ends: list[int] = [arena.start]
        # The driver has refused the pages from here on.
        self._limit = arena.nbytes

    def pinned(self) -> bool:
        """Return whether all pages that were created ahead are page-locked."""
        return self._arena.start < self._arena.populated <= self._ends[-1]

    def part_end(self, offset: int) -> int:
        """Return the end of the locked part that holds `offset` of the arena; 0 if it is not locked. Takes no lock."""
        ends = self._ends
        at = bisect_right(ends, offset)
        return ends[at] if 0 < at < len(ends) else 0

    def busy(self) -> bool:
        """Return whether a part is being locked."""
        return self._registering

    def start(self, device: torch.device) -> None:
        """Begin at the first call. `device`: the device whose context is used; the lock holds for all devices."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._settled = False
                self._device = device
                self._thread = threading.Thread(target=self._run, name="capd-pin", daemon=True)
                self._thread.start()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[bool]:
        """Undo the page lock within this context; yield False if a part is being locked.

        The client thread calls it while no copy is under way. Afterwards, pages that are populated are locked again,
        but none after a part that the driver has refused.
        """
        try:
            with self._lock:
                free = not self._registering
                if free:
                    self._unlock()
                yield free
        finally:
            with self._arena.grown:
                self._arena.grown.notify_all()

    def close(self, release: Callable[[], None]) -> None:
        """Undo the page lock and call `release`.

        If the locking takes more than another second, its thread does both at the end.
        """
        with self._lock:
            self._closed.set()
        with self._arena.grown:
            self._arena.grown.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        with self._lock:
            if not self._settled:
                self._release = release
                return
            self._unlock()
        release()

    def _run(self) -> None:
        while self._limit > self._arena.start and (end := self._next_end()):
            started = time.monotonic()
            problem = self._register(end)
            if problem is not None:
                self._report(problem)
            self._closed.wait(time.monotonic() - started)
        with self._lock:
            self._settled = True
            release = self._release
            if release is not None:
                self._unlock()
        if release is not None:
            release()

    def _report(self, problem: str) -> None:
        nbytes = self._limit - self._arena.start
        pinned = f"only the first {nbytes >> 20} MiB of the arena are" if nbytes else "the arena is not"
        self._notices.warn("unpinned", "%s pinned, copies from devices are slower: %s", pinned, problem)

    def _next_end(self) -> int:
        """Wait until there are pages to lock; set `_registering` and return their end. 0 after `close`.

        Locking pages that already exist is faster, and the driver holds its lock for a shorter time.
        """
        while not self._closed.is_set():
            with self._arena.grown:
                self._arena.grown.wait_for(lambda: self._closed.is_set() or self._unlocked_end())
            with self._lock:
                end = 0 if self._closed.is_set() else self._unlocked_end()
                self._registering = end > 0
                if end:
                    return end
        return 0

    def _unlocked_end(self) -> int:
        """Return the end of the next part; 0: nothing to do now.

        A part is due when a whole chunk of pages is there. A smaller part is due when the arena no longer grows, or
        when the driver refuses the pages after it.
        """
        begin = self._ends[-1]
        there = min(self._arena.populated, self._limit)
        if there >= begin + self._chunk_nbytes:
            return begin + self._chunk_nbytes
        ended = there in (self._arena.target, self._limit)
        return there if ended and begin < there else 0

    def _register(self, end: int) -> Optional[str]:
        begin = self._ends[-1]
        assert self._device is not None  # noqa: S101 - set before the thread is started
        try:
            problem = pin(self._arena.address + begin, end - begin, self._device)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            self._registering = False
            if problem is None:
                self._ends.append(end)
            else:
                self._limit = begin
        return problem

    def _unlock(self) -> None:
        begins, self._ends = self._ends[:-1], [self._arena.start]
        for begin in reversed(begins):
            assert self._device is not None  # noqa: S101 - as in `_register`
            # The job will see a device error itself.
            with contextlib.suppress(RuntimeError):
                unpin(self._arena.address + begin, self._device)
