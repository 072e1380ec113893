"""Page-locks a rank's arena for its GPUs, once, in a thread that neither training nor leaving waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Optional

import torch

from capd_client.arena import Arena
from capd_client.cuda import pin, unpin
from capd_client.notices import Notices

__all__ = ["Pinning"]

_JOIN_S = 1.0  # registering cannot be interrupted
_LOOK_S = 0.05


class Pinning:
    """The page lock of `arena`. As long as it takes, and where it fails, copies go through pageable memory, slower."""

    def __init__(self, arena: Arena, notices: Notices) -> None:
        self._arena = arena
        self._notices = notices
        self._lock = threading.RLock()  # a signal handler may close the session
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._settled = True  # the thread has nothing left to do
        self._release: Optional[Callable[[], None]] = None
        self._pinned_for: Optional[torch.device] = None

    def pinned(self) -> bool:
        """Whether the arena is page-locked."""
        return self._pinned_for is not None

    def start(self, device: torch.device) -> None:
        """Begin, at the first call. `device`: in whose context; the lock holds for all devices."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._settled = False
                self._thread = threading.Thread(
                    target=self._run, args=(device,), name="capd-pin", daemon=True
                )
                self._thread.start()

    def close(self, release: Callable[[], None]) -> None:
        """Unlock and call `release`: here, or, where the locking takes more than another second, at its end."""
        with self._lock:
            self._closed.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        with self._lock:
            if not self._settled:
                self._release = release
                return
        self._unlock()
        release()

    def _run(self, device: torch.device) -> None:
        while not self._arena.prefaulted(_LOOK_S) and not self._closed.is_set():
            pass  # registering pages that are there is faster, and holds a lock of the driver for shorter
        problem = None if self._closed.is_set() else self._register(device)
        with self._lock:
            self._settled = True
            release = self._release
        if release is not None:
            self._unlock()
            release()
        elif problem is not None:
            self._notices.warn(
                "unpinned", "the arena is not pinned, copies from devices are slower: %s", problem
            )

    def _register(self, device: torch.device) -> Optional[str]:
        try:
            problem = pin(self._arena.address, self._arena.nbytes, device)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            self._pinned_for = device
        return problem

    def _unlock(self) -> None:
        device, self._pinned_for = self._pinned_for, None
        if device is not None:
            with contextlib.suppress(RuntimeError):  # a device error, which is the job's to tell
                unpin(self._arena.address, device)
