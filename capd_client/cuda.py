"""The CUDA side of `capd_client.device.Device`: one side stream, pooled events, no host synchronisation."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from capd_client.device import Event
from capd_client.notices import Notices, logger
from capd_client.ring import ring_nbytes

__all__ = [
    "CudaDevice", "cuda_runtimes", "is_capturing", "mapped_libraries", "pin", "ring_sizes", "side_stream",
    "take_thread", "unpin",
]  # fmt: skip

_CAPTURE_MODE_THREAD_LOCAL = 1
_STREAM_NON_BLOCKING = 1  # it does not wait for the default stream, nor that one for it
_REGISTER_PORTABLE = 1
_MAX_REGISTER_NBYTES = 512 << 30  # from here on drivers of release 580 fail, and leave the error latched


class CudaDevice:
    """One GPU. is_pinned: whether memory (address, bytes) is page-locked; copies to other wait in the client thread."""

    def __init__(self, device: torch.device, is_pinned: Callable[[int, int], bool]) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]  # torch's own lack
        self._events: deque[torch.cuda.Event] = deque()
        self._is_pinned = is_pinned

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether it is page-locked, which it is for all devices or for none."""
        return self._is_pinned(host.data_ptr(), host.numel())

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return is_capturing()

    def allocate_ring(self) -> torch.Tensor:
        """The ring; empty when the device has no memory left for it.

        From the side stream's own pool: a block that the job has freed could still be written by what it has queued.
        What this thread issues next comes behind what the side stream has in its queue: where algorithms are to be
        deterministic torch fills new memory there. And it has 32 streams for all: the job may know ours, too.
        """
        device = torch.device("cuda", self._index)
        # Without the first guard, the second would come back by way of GPU 0.
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            for nbytes in ring_sizes(self._index):
                try:
                    ring = torch.empty(nbytes, dtype=torch.uint8, device=device)
                    break
                except torch.cuda.OutOfMemoryError:
                    continue
        torch.cuda.current_stream(self._index).wait_stream(self._stream)
        return ring

    def record(self) -> Event:
        """An event on this thread's current stream: in a backward that is the autograd engine's choice."""
        event = self._event()
        event.record(torch.cuda.current_stream(self._index))
        return event

    def enter_thread(self) -> None:
        """See `take_thread`; and what this thread issues to the device goes to the side stream from now on."""
        take_thread(torch.device("cuda", self._index))
        torch.cuda.set_stream(self._stream)

    def fetch(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Event]) -> None:
        """In the thread of `enter_thread`. Asynchronous; into pageable memory the driver makes this thread wait.

        Never torch's own waiting: `set_sync_debug_mode("error")` holds for every thread, and would end all captures.
        """
        for event in after:
            self._stream.wait_event(event)
        host.copy_(source, non_blocking=True)

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


def ring_sizes(
    device: int | torch.device, asked: int | None = None, notices: Notices | None = None
) -> tuple[int, ...]:
    """The sizes that a ring on `device` may have, in the order in which they are to be tried; the last one is 0.

    What torch's allocator holds without using it counts as free: of a job that has run a while the driver has little
    left. It may lie in pieces, so the second size is one by what the driver has.

    Args:
        device: The device, or its index.
        asked: The setting `ring_bytes`.
        notices: Where to say that so much is not free.
    """
    free, total = torch.cuda.mem_get_info(device)
    unused = 0
    with contextlib.suppress(RuntimeError):  # an allocator of the job's own has no statistics
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    usable = free + max(0, unused)
    largest = ring_nbytes(usable, total, asked)
    if notices is not None and asked is not None and asked > usable // 2:
        notices.warn(
            "ring_bytes",
            "a ring of %d bytes takes more than half of the memory that is free on the device, it has %d bytes. "
            "Lower CAPD_RING_BYTES",
            asked,
            largest,
        )
    return tuple(sorted({largest, ring_nbytes(free, total, asked), 0}, reverse=True))


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream of this thread."""
    return torch.cuda.is_current_stream_capturing()


def cuda_runtimes() -> list[Any]:
    """Every CUDA runtime library mapped into this process; wheels give theirs a hashed name."""
    return mapped_libraries("libcudart")


def mapped_libraries(prefix: str) -> list[Any]:
    """Every library mapped into this process whose file name begins so."""
    paths: set[str] = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(prefix):
                paths.add("/" + path)
    libraries = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # its file is gone, or another one by now
            libraries.append(ctypes.CDLL(path))
    return libraries


_side_streams: dict[int, torch.cuda.Stream] = {}


def side_stream(index: int) -> torch.cuda.Stream:
    """The stream of capd's own on GPU `index`, one for the life of the process.

    Of torch's streams, 32 that are shared out in turn, a job with many would get ours as well: its kernels would wait
    for copies. Where none can be made it is one of those, and the reason is logged at DEBUG.
    """
    # Never destroyed. torch's allocator keeps the ring's memory for this stream when a session has ended, and may wait
    # for the stream when it gives the memory back. The next session finds both.
    found = _side_streams.get(index)
    if found is None:
        try:
            with torch.cuda.device(torch.device("cuda", index)):
                handle = _new_stream(index)
            found = torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]  # torch's own lack
        except (OSError, RuntimeError) as error:
            logger.debug("capd: a stream of torch's is used on GPU %d: %s", index, error)
            return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]  # torch's own lack
        _side_streams[index] = found
    return found


def _new_stream(index: int) -> int:
    """The handle of a new stream of the current device, which must be `index` for the runtime that makes it, too."""
    problem = "no runtime library with the functions for it is mapped"
    for get_device, create in _functions("GetDevice", "StreamCreateWithFlags"):
        current, handle = ctypes.c_int(-1), ctypes.c_void_p()
        # A runtime of another library than torch's may be about another device in this thread.
        if get_device(ctypes.byref(current)) or current.value != index:
            problem = f"GPU {current.value} is the current one of a runtime library"
        elif code := create(ctypes.byref(handle), _STREAM_NON_BLOCKING):
            problem = f"no stream could be made, error {int(code)}"
        elif handle.value:
            return handle.value
    raise RuntimeError(problem)


def _functions(*names: str) -> Iterator[tuple[Any, ...]]:
    """These functions of every runtime that has them all: of CUDA's under cuda…, else of ROCm's under hip…"""
    runtimes = [("cuda", runtime) for runtime in cuda_runtimes()]
    for prefix, runtime in runtimes or [("hip", runtime) for runtime in mapped_libraries("libamdhip64")]:
        found = tuple(getattr(runtime, prefix + name, None) for name in names)
        if all(found):
            yield found


def take_thread(device: torch.device) -> None:
    """At the beginning of a thread of capd's own: its CUDA calls concern `device` and break nobody's graph capture.

    A thread begins on GPU 0, where the first of its calls, if only the query of an event, would make a context: half
    a gigabyte of a GPU that may be another rank's.
    """
    torch.cuda.set_device(device)
    _keep_out_of_captures()


def _keep_out_of_captures() -> None:
    """From now on nothing that this thread calls breaks a CUDA graph capture of another thread.

    In torch's default mode a capture forbids many calls to every thread of the process, and fails if one is made.
    """
    done = False
    for exchange in _exchanges_of_mode():
        mode = ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)
        done |= exchange(ctypes.byref(mode)) == 0
    if not done:
        _tell_of_captures()


def _exchanges_of_mode() -> list[Any]:
    """The functions that set a thread's capture mode, of all runtimes; of the driver, whose mode it is, where no
    runtime is mapped because it is part of another library."""
    name = "ThreadExchangeStreamCaptureMode"
    found = [exchange for (exchange,) in _functions(name)]
    return found or [
        exchange
        for driver in mapped_libraries("libcuda.so")
        if (exchange := getattr(driver, "cu" + name, None)) is not None
    ]


@functools.cache
def _tell_of_captures() -> None:
    Notices().warn(
        "capture_mode",
        "capd's threads cannot keep out of the capture of CUDA graphs: neither a CUDA or HIP runtime library nor the "
        "driver takes their capture mode. A graph that the job captures meanwhile may fail, unless with "
        'capture_error_mode="thread_local"',
    )


def pin(address: int, nbytes: int, device: torch.device) -> str | None:
    """Page-lock [address, address + nbytes) for `device` and all others; returns why not, or None.

    No copy may cross from one registration into another. Takes about a second per GiB: call it in a thread of its own,
    after the pages are made. RLIMIT_MEMLOCK does not count: the driver locks them, not
    mlock(2). A failure leaves no latched CUDA error behind, which would surface at another's next kernel launch.
    """
    if nbytes >= _MAX_REGISTER_NBYTES:
        return f"{nbytes} bytes cannot be registered at once, the limit is {_MAX_REGISTER_NBYTES}"
    with torch.cuda.device(device):  # so that no context is made on GPU 0
        _keep_out_of_captures()
        code = int(_runtime().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
        if code:
            for (get_last_error,) in _functions("GetLastError"):
                get_last_error()
    return None if code == 0 else f"cudaHostRegister of {nbytes} bytes failed with error {code}"


def unpin(address: int, device: torch.device) -> None:
    """Undo `pin`; needed before the memory is unmapped."""
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own lack
