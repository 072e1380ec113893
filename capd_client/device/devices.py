"""The devices of a session: one stager each, the arena's page lock, and the limit on their copies together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Union

import torch

from capd_client.arena.arena import Arena
from capd_client.config.settings import ClientConfig
from capd_client.device.cuda.device import CudaDevice
from capd_client.device.cuda.locality import local_cpus
from capd_client.device.cuda.pinning import Pinning
from capd_client.device.cuda.runtime import is_capturing
from capd_client.device.holding import MAX_HELD_NBYTES, Holding
from capd_client.device.pacing import Pace
from capd_client.device.snapshots import DeviceStager
from capd_client.inflight.queue import Queue
from capd_client.process.log import Notices
from capd_client.protocol.counter_page import DropReason

__all__ = ["Devices"]

_JOIN_S = 2.0  # compiling is left off between two looks at whether it is still wanted
_FIRST_STEPS = 3  # in which the device loads modules of the job's own


class Devices:
    """Sets devices up when they are first needed, as the settings say. add: tells the client thread of a new stager."""

    def __init__(
        self,
        queue: Queue,
        arena: Arena,
        notices: Notices,
        config: ClientConfig,
        add: Callable[[DeviceStager], None],
    ) -> None:
        self._queue = queue
        self._arena = arena
        self._notices = notices
        self._config = config
        self._add = add
        self._pace = Pace(config.max_d2h_gbps)
        self._pinning = Pinning(arena, notices)
        self._lock = threading.RLock()  # a signal handler may capture, too
        self._making = False
        self._stagers: dict[torch.device, Union[DeviceStager, DropReason]] = {}
        self._closing = threading.Event()
        self._steps = 0  # that have begun
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
                if is_capturing(device):
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
        return any(stager.inside() for stager in self._all())

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Set up these devices, CUDA ones, now: rings are not allocated inside of a training step then."""
        for device in devices:
            self.stager(device)

    def begin_step(self) -> None:
        """A training step begins."""
        self._steps += 1

    def hurry(self) -> None:
        """The session is closing: copies are not held back any more."""
        self._pace.lift()

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[bool]:
        """See `Pinning.lifted`; no copy is issued meanwhile."""
        with contextlib.ExitStack() as stack:
            stagers = self._all()
            for stager in stagers:
                stack.enter_context(stager.transfers.pause())
            if any(stager.pending for stager in stagers):
                yield False
            else:
                with self._pinning.lifted() as free:
                    yield free

    def close(self, release: Callable[[], None]) -> None:
        """When nothing writes to the arena any more: undo its page lock, then call `release`, maybe in a thread."""
        self._pinning.close(release)

    def stop(self) -> None:
        """Wake whoever still waits for room, and have no more kernels compiled."""
        self._closing.set()
        for stager in self._all():
            stager.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._compiling:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _all(self) -> list[DeviceStager]:
        return [stager for stager in list(self._stagers.values()) if isinstance(stager, DeviceStager)]

    def _make(self, device: torch.device) -> Union[DeviceStager, DropReason]:
        config = self._config
        try:
            gpu = CudaDevice(
                device,
                self._pinning.part_end,
                self._pinning.busy,
                self._notices,
                ring_bytes=config.ring_bytes,
                raw=config.gpu_calls == "raw",
            )
            stager = DeviceStager(
                gpu,
                self._queue,
                self._arena.buffer,
                pace=self._pace,
                max_block_s=config.max_block_s,
                # Copies that are held back cannot be waited for on the device: they are not issued yet.
                ordered=config.ring_waits and not self._pace.limited,
                holding=Holding(MAX_HELD_NBYTES if config.snapshot == "auto" else 0),
                piece_nbytes=config.piece_bytes,
                on_failure=self._failed,
            )
            gpu.warm(rows=self._keeps_rows)
            if self._keeps_rows:
                self._compile_rows(gpu)
            stager.start()
        except Exception as error:
            self._notices.warn("device_setup", "%s cannot be captured: %s", device, error)
            return DropReason.INTERNAL
        self._arena.near(local_cpus(device))
        self._pinning.start(device)
        self._add(stager)
        return stager

    def _failed(self, error: Exception) -> None:
        self._notices.warn("device", "copies from a device failed: %s; it is not captured any more", error)

    @property
    def _keeps_rows(self) -> bool:
        """Whether statistics are to be kept without their tensors: then a device computes them."""
        return self._config.store == "stats" or any(rule.store == "stats" for rule in self._config.rules)

    def _compile_rows(self, gpu: CudaDevice) -> None:
        """Have the kernel of the statistics compiled in a thread. Until it is there torch's operations compute them."""
        thread = threading.Thread(target=self._compile, args=(gpu,), name="capd-compile", daemon=True)
        self._compiling.append(thread)
        thread.start()

    def _compile(self, gpu: CudaDevice) -> None:
        try:
            gpu.prepare_rows(self._closing.is_set, self._may_load)
        except Exception as error:  # a device error, which is the job's to tell
            self._notices.warn("compile", "statistics go on with torch's own operations: %s", error)

    def _may_load(self) -> bool:
        """Whether a module may be loaded now: launches of the job wait for that until the device is idle."""
        return not 0 < self._steps <= _FIRST_STEPS
