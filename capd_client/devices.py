"""The devices of a session: one stager each, the arena's page lock, and the limit on their copies together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Optional, Union

import torch

from capd_client.arena import Arena
from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.cuda import CudaDevice, is_capturing, take_thread
from capd_client.device import DeviceStager
from capd_client.devstats import has_kernel, prepare
from capd_client.notices import Notices
from capd_client.pacing import Pace
from capd_client.pinning import Pinning

__all__ = ["Devices"]

_JOIN_S = 2.0  # compiling is left off between two dtypes, half a second each


class Devices:
    """Sets devices up when they are first needed. add: hands a new stager to the client thread. wake: tells that
    thread that there is something to do.

    max_block_s: how long a capture may wait for room on a device. max_d2h_gbps: 10⁹ bytes per second from all of
    them together, None for no limit.
    """

    def __init__(
        self,
        books: Books,
        arena: Arena,
        notices: Notices,
        add: Callable[[DeviceStager], None],
        wake: Callable[[], None],
        *,
        max_block_s: float,
        max_d2h_gbps: Optional[float],
    ) -> None:
        self._books = books
        self._arena = arena
        self._notices = notices
        self._add = add
        self._wake = wake
        self._max_block_s = max_block_s
        self._pace = Pace(max_d2h_gbps)
        self._pinning = Pinning(arena, notices)
        self._lock = threading.RLock()  # a signal handler may capture, too
        self._making = False
        self._stagers: dict[torch.device, Union[DeviceStager, DropReason]] = {}
        self._closing = threading.Event()
        self._compiling: list[threading.Thread] = []

    @property
    def pinned(self) -> bool:
        """Whether all pages of the arena that were made ahead are page-locked."""
        return self._pinning.pinned()

    def stager(self, device: torch.device) -> Union[DeviceStager, DropReason]:
        """The stager of a device, or why there is none."""
        found = self._stagers.get(device)
        if found is not None:
            return found
        with self._lock:
            if device not in self._stagers:
                if is_capturing():
                    return DropReason.STREAM_CAPTURE  # making one now would break the capture
                if self._making:
                    return DropReason.INTERNAL  # to a signal handler that interrupted this thread in `_make`
                self._making = True
                try:
                    self._stagers[device] = self._make(device)
                finally:
                    self._making = False
            return self._stagers[device]

    def inside(self) -> bool:
        """Whether this thread is inside of a ring already: then it runs a signal handler that interrupted it there."""
        return any(isinstance(stager, DeviceStager) and stager.inside() for stager in self._stagers.values())

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Set up these devices, CUDA ones, now: rings are not allocated inside of a training step then."""
        for device in devices:
            self.stager(device)

    def hurry(self) -> None:
        """The session is closing: copies are not held back any more."""
        self._pace.lift()

    def unlocked(self) -> AbstractContextManager[bool]:
        """See `Pinning.lifted`."""
        return self._pinning.lifted()

    def close(self, release: Callable[[], None]) -> None:
        """When nothing writes to the arena any more: undo its page lock, then call `release`, maybe in a thread."""
        self._pinning.close(release)

    def stop(self) -> None:
        """Wake whoever still waits for room, and have no more kernels compiled."""
        self._closing.set()
        for stager in list(self._stagers.values()):
            if isinstance(stager, DeviceStager):
                stager.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._compiling:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _make(self, device: torch.device) -> Union[DeviceStager, DropReason]:
        try:
            stager = DeviceStager(
                CudaDevice(device, self._pinning.covers),
                self._books,
                self._arena.buffer,
                pace=self._pace,
                max_block_s=self._max_block_s,
                has_kernel=partial(has_kernel, device),
                wake=self._wake,
            )
        except Exception as error:
            self._notices.warn("device_setup", "%s cannot be captured: %s", device, error)
            return DropReason.INTERNAL
        self._pinning.start(device)
        thread = threading.Thread(target=self._compile, args=(device,), name="capd-compile", daemon=True)
        self._compiling.append(thread)
        thread.start()
        self._add(stager)
        return stager

    def _compile(self, device: torch.device) -> None:
        """Have the kernel of the statistics compiled; until it is there, and where none can be, the daemon computes."""
        take_thread(device)
        prepare(device, self._closing.is_set)
