"""The devices of a session: one stager for each, the arena's page lock, and the common limit on their copies."""

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
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.counter_page import DropReason

__all__ = ["Devices"]

# The compiler checks at intervals whether its kernel is still wanted.
_JOIN_S = 2.0
# In these steps the device loads the job's own modules.
_FIRST_STEPS = 3


class Devices:
    """The devices of a session, each set up when it is first needed."""

    def __init__(
        self,
        queue: Queue,
        arena: Arena,
        notices: RateLimitedLog,
        config: ClientConfig,
    ) -> None:
        """Set up no device yet.

        Args:
            queue: The in-flight captures of the session.
            arena: The session's arena.
            notices: The log of the session's warnings.
            config: The settings.
        """
        self._queue = queue
        self._arena = arena
        self._notices = notices
        self._config = config
        self._pace = Pace(config.max_d2h_gbps)
        self._pinning = Pinning(arena, notices)
        # Re-entrant, because a signal handler of the job may capture.
        self._lock = threading.RLock()
        self._making = False
        # The client thread serves them.
        self.stagers: list[DeviceStager] = []
        self._by_device: dict[torch.device, Union[DeviceStager, DropReason]] = {}
        self._closing = threading.Event()
        # The number of steps that have begun.
        self._steps = 0
        self._compiling: list[threading.Thread] = []

    @property
    def pinned(self) -> bool:
        """Whether all pages of the arena that were created ahead are page-locked."""
        return self._pinning.pinned()

    def stager(self, device: torch.device) -> Union[DeviceStager, DropReason]:
        """Return the stager of a device, or the reason why there is none."""
        found = self._by_device.get(device)
        if found is not None:
            return found
        with self._lock:
            if device not in self._by_device:
                if is_capturing(device):
                    # Creating a stager now would break the capture of the graph.
                    return DropReason.STREAM_CAPTURE
                if self._making:
                    # The caller is a signal handler that interrupted this thread in `_make`.
                    return DropReason.INTERRUPTED
                self._making = True
                try:
                    self._by_device[device] = self._make(device)
                finally:
                    self._making = False
            return self._by_device[device]

    def inside(self) -> bool:
        """Return whether this thread is inside a ring already. If so, a signal handler interrupted it there."""
        return any(stager.inside() for stager in self.stagers)

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Set up these CUDA devices now, so that no training step allocates a ring."""
        for device in devices:
            self.stager(device)

    def begin_step(self) -> None:
        """Note the beginning of a training step."""
        self._steps += 1

    def hurry(self) -> None:
        """Lift the limit on copies, because the session closes."""
        self._pace.lift()

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[bool]:
        """Undo the page lock as `Pinning.lifted` does. No copy is issued in the meantime."""
        with contextlib.ExitStack() as stack:
            stagers = list(self.stagers)
            for stager in stagers:
                stack.enter_context(stager.transfers.pause())
            if any(stager.pending for stager in stagers):
                yield False
            else:
                with self._pinning.lifted() as free:
                    yield free

    def close(self, release: Callable[[], None]) -> None:
        """Undo the page lock, then call `release`, perhaps in a thread.

        Call it when nothing writes to the arena any more.
        """
        self._pinning.close(release)

    def stop(self) -> None:
        """Wake every thread that waits for room, and end the compilation of kernels."""
        self._closing.set()
        for stager in self.stagers:
            stager.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._compiling:
            thread.join(max(0.0, deadline - time.monotonic()))

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
                # The device cannot wait for copies that the pace holds back, because they are not issued yet.
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
        self.stagers.append(stager)
        return stager

    def _failed(self, error: Exception) -> None:
        self._notices.warn("device", "copies from a device failed: %s; it is not captured any more", error)

    @property
    def _keeps_rows(self) -> bool:
        """Whether statistics are kept without their tensors. The device computes them then."""
        return self._config.store == "stats" or any(rule.store == "stats" for rule in self._config.rules)

    def _compile_rows(self, gpu: CudaDevice) -> None:
        """Compile the kernel of the statistics in a thread. Until it is ready, torch's operations compute them."""
        thread = threading.Thread(target=self._compile, args=(gpu,), name="capd-compile", daemon=True)
        self._compiling.append(thread)
        thread.start()

    def _compile(self, gpu: CudaDevice) -> None:
        try:
            gpu.prepare_rows(self._closing.is_set, self._may_load)
        except Exception as error:
            # The job will see a device error itself.
            self._notices.warn("compile", "torch's own operations still compute the statistics: %s", error)

    def _may_load(self) -> bool:
        """Return whether a module may be loaded now. Loading blocks the job's launches until the device is idle."""
        return not 0 < self._steps <= _FIRST_STEPS
