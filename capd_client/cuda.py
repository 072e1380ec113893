"""The CUDA side of `capd_client.device.Device`: one side stream, pooled events, no host synchronisation."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import torch

from capd_client.device import Event, ring_nbytes

__all__ = ["CudaDevice", "cuda_runtimes", "pin", "unpin"]

_CAPTURE_MODE_THREAD_LOCAL = 1
_REGISTER_PORTABLE = 1


class CudaDevice:
    """One GPU. `pinned` says whether the arena is registered; until then copies wait in the client thread."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]  # torch's own lack
        self._events: deque[torch.cuda.Event] = deque()
        self.pinned = threading.Event()

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def allocate_ring(self) -> torch.Tensor:
        """The snapshot ring; empty when the device has no memory left for it."""
        free, _total = torch.cuda.mem_get_info(self._index)
        nbytes = ring_nbytes(free)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index))
        except torch.cuda.OutOfMemoryError:
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def record(self) -> Event:
        """An event on this thread's current stream: in a backward that is the autograd engine's choice."""
        event = self._event()
        event.record(torch.cuda.current_stream(self._index))
        return event

    def enter_thread(self) -> None:
        """Keep this thread's event queries out of CUDA graph captures that other threads run."""
        mode = ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)
        for runtime in cuda_runtimes():
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            mode.value = _CAPTURE_MODE_THREAD_LOCAL  # the call swaps; every mapped runtime gets the same

    def fetch(self, source: torch.Tensor, host: torch.Tensor, after: Event) -> None:
        """Asynchronous into pinned memory; into pageable memory the driver would make this thread wait."""
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            host.copy_(source, non_blocking=self.pinned.is_set())

    def fetched(self) -> Event:
        """An event on the side stream."""
        event = self._event()
        event.record(self._stream)
        return event

    def query(self, event: Event) -> bool:
        """cudaEventQuery."""
        return bool(event.query())

    def recycle(self, event: Event) -> None:
        """Creating events can be expensive while others do it too: they are kept."""
        self._events.append(event)

    def _event(self) -> torch.cuda.Event:
        try:
            return self._events.pop()
        except IndexError:
            return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own lack


def cuda_runtimes() -> list[Any]:
    """Every CUDA runtime library mapped into this process; wheels give theirs a hashed name."""
    paths: set[str] = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith("libcudart"):
                paths.add("/" + path)
    return [ctypes.CDLL(path) for path in sorted(paths)]


def pin(address: int, nbytes: int, device: torch.device) -> str | None:
    """Page-lock [address, address + nbytes) for `device` and all others; returns why not, or None.

    Takes seconds per GiB: call it in a thread of its own, behind prefaulting. A failure leaves no latched CUDA
    error behind, which would otherwise surface at somebody else's next kernel launch.
    """
    with torch.cuda.device(device):  # so that no context is made on GPU 0
        code = int(_runtime().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
    if code == 0:
        return None
    for runtime in cuda_runtimes():
        runtime.cudaGetLastError()
    return f"cudaHostRegister of {nbytes} bytes failed with error {code}"


def unpin(address: int) -> None:
    """Undo `pin`; needed before the memory is unmapped."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own lack
