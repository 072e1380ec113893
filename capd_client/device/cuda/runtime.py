"""The CUDA side of `capd_client.device.seam.Device`: one side stream, pooled events, no host synchronisation."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Optional

import torch

from capd_client.device.ring import ring_nbytes
from capd_client.process.log import Notices, logger

__all__ = [
    "cuda_runtimes", "is_capturing", "mapped_libraries", "pin", "ring_sizes", "side_stream",
    "take_thread", "unpin",
]  # fmt: skip

_CAPTURE_MODE_THREAD_LOCAL = 1
_STREAM_NON_BLOCKING = 1  # it does not wait for the default stream, nor that one for it
_REGISTER_PORTABLE = 1
_MAX_REGISTER_NBYTES = 512 << 30  # from here on drivers of release 580 fail, and leave the error latched


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


def is_capturing(device: Optional[torch.device] = None) -> bool:
    """Whether a CUDA graph is being captured on this thread's current stream of `device`, None: of the current one."""
    if device is None or device.index is None or torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch asks the current device
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
