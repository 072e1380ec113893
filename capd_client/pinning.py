"""Page-locks a rank's arena for its GPUs as it grows, in a thread that neither training nor leaving waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Optional

import torch

from capd_client.arena import Arena
from capd_client.cuda import pin, unpin
from capd_client.notices import Notices

__all__ = ["Pinning"]

_JOIN_S = 1.0  # registering cannot be interrupted


class Pinning:
    """The page lock of `arena`, in parts that end where its growth did. A copy may not cross from one part into another
    (`capd_client.pieces`). Until memory is locked, and where that fails, copies go through pageable memory, slower.
    """

    def __init__(self, arena: Arena, notices: Notices) -> None:
        self._arena = arena
        self._notices = notices
        self._lock = threading.RLock()  # a signal handler may close the session
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._settled = True  # the thread is not there yet, or has nothing left to do
        self._release: Optional[Callable[[], None]] = None
        self._device: Optional[torch.device] = None
        self._registering = False
        self._ends: list[int] = [arena.start]  # of the parts: each begins where another one ends

    def pinned(self) -> bool:
        """Whether all pages that were made ahead are page-locked."""
        return self._arena.start < self._arena.populated <= self._ends[-1]

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether this memory of the arena is page-locked."""
        return address + nbytes <= self._arena.address + self._ends[-1]

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

        For the client thread, with no copy under way. What is populated behind it is locked again.
        """
        with self._lock:
            free = not self._registering
            if free:
                self._unlock()
            yield free
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
        problem = None
        while problem is None and (end := self._next_end()):
            problem = self._register(end)
        with self._lock:
            self._settled = True
            release = self._release
            if release is not None:
                self._unlock()
        if release is not None:
            release()
        elif problem is not None:
            self._notices.warn(
                "unpinned", "the arena is not pinned, copies from devices are slower: %s", problem
            )

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
        """Where the growth of the arena has ended, if that is behind what is locked; 0: nothing to do now."""
        end = self._arena.populated
        return end if self._ends[-1] < end == self._arena.target else 0

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
        return problem

    def _unlock(self) -> None:
        begins, self._ends = self._ends[:-1], [self._arena.start]
        for begin in begins:
            assert self._device is not None  # noqa: S101 - as above
            with contextlib.suppress(RuntimeError):  # a device error, which is the job's to tell
                unpin(self._arena.address + begin, self._device)
