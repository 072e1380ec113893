"""Page-locks a rank's arena for its GPUs as it grows, in a thread that neither training nor leaving waits for."""

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
from capd_client.process.log import Notices

__all__ = ["CHUNK_NBYTES", "Pinning"]

_JOIN_S = 1.0  # registering cannot be interrupted
CHUNK_NBYTES = 128 << 20
# Linux 6.11 to 6.13 refuse 2 GB at once, whatever memory there is.
_MAX_CHUNK_NBYTES = 2 * 10**9 // STEP_NBYTES * STEP_NBYTES


class Pinning:
    """The page lock of `arena`, in parts, each usable as soon as it is locked. A copy may not cross from one part into
    another (`part_end`). Until memory is locked, and where that fails, copies go another way, slower.

    A part is at most `chunk_nbytes` (a multiple of STEP_NBYTES) and is followed by a pause as long as its locking took:
    the driver holds locks meanwhile that other threads, and other ranks of the node, wait for.
    """

    def __init__(self, arena: Arena, notices: Notices, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._arena = arena
        self._notices = notices
        self._chunk_nbytes = min(chunk_nbytes, _MAX_CHUNK_NBYTES)
        self._lock = threading.RLock()  # a signal handler may close the session
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._settled = True  # the thread is not there yet, or has nothing left to do
        self._release: Optional[Callable[[], None]] = None
        self._device: Optional[torch.device] = None
        self._registering = False
        self._ends: list[int] = [arena.start]  # of the parts: each begins where another one ends
        self._limit = arena.nbytes  # from here on the driver has refused

    def pinned(self) -> bool:
        """Whether all pages that were made ahead are page-locked."""
        return self._arena.start < self._arena.populated <= self._ends[-1]

    def part_end(self, offset: int) -> int:
        """Where the locked part ends that `offset` of the arena lies in; 0 where it is not locked. Takes no lock."""
        ends = self._ends
        at = bisect_right(ends, offset)
        return ends[at] if 0 < at < len(ends) else 0

    def busy(self) -> bool:
        """Whether a part is being locked."""
        return self._registering

    def start(self, device: torch.device) -> None:
        """Begin, at the first call. `device`: in whose context; the lock holds for all devices."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._settled = False
                self._device = device
                self._thread = threading.Thread(target=self._run, name="capd-pin", daemon=True)
                self._thread.start()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[bool]:
        """The lock undone, and none taken, as long as this lasts; False while a part is being locked.

        For the client thread, with no copy under way. What is populated after it is locked again; where the driver
        has refused a part, only what lies before that.
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
        """Unlock and call `release`: here, or, where the locking takes more than another second, at its end."""
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
                self._tell(problem)
            self._closed.wait(time.monotonic() - started)
        with self._lock:
            self._settled = True
            release = self._release
            if release is not None:
                self._unlock()
        if release is not None:
            release()

    def _tell(self, problem: str) -> None:
        nbytes = self._limit - self._arena.start
        pinned = f"of the arena only the first {nbytes >> 20} MiB are" if nbytes else "the arena is not"
        self._notices.warn("unpinned", "%s pinned, copies from devices are slower: %s", pinned, problem)

    def _next_end(self) -> int:
        """Wait until there are pages to lock: registering them then is faster, and holds a lock of the driver for
        shorter. Where they end, and `_registering`; 0 once all is closed."""
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
        """Where the next part is to end: a whole chunk of pages is there, or the growth of the arena has ended, or the
        driver refuses what comes next. 0: nothing to do now."""
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
            assert self._device is not None  # noqa: S101 - as above
            with contextlib.suppress(RuntimeError):  # a device error, which is the job's to tell
                unpin(self._arena.address + begin, self._device)
