"""The CUDA runtime as capd uses it: its own streams, capture modes, page locks, and the size of a ring."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Optional

import torch

from capd_client.device.ring import ring_nbytes
from capd_client.process.log import RateLimitedLog, logger

__all__ = [
    "cuda_runtimes", "is_capturing", "mapped_libraries", "pin", "ring_sizes", "side_stream",
    "take_thread", "unpin",
]  # fmt: skip

_CAPTURE_MODE_THREAD_LOCAL = 1
# The stream and the default stream do not wait for each other.
_STREAM_NON_BLOCKING = 1
_REGISTER_PORTABLE = 1
# From this size on, drivers of release 580 fail and leave the error latched.
_MAX_REGISTER_NBYTES = 512 << 30


def ring_sizes(
    device: int | torch.device, asked: int | None = None, notices: RateLimitedLog | None = None
) -> tuple[int, ...]:
    """Return the possible sizes of a ring on `device`, in the order of trial; the last one is 0.

    Memory that torch's allocator holds but does not use counts as free. In a job that has run for a while, the driver
    itself has little left. The allocator's memory may be fragmented. The second size therefore counts only the
    driver's free memory.

    Args:
        device: The device, or its index.
        asked: The setting `ring_bytes`.
        notices: Receives a warning if the setting is more than half of the free memory.
    """
    free, total = torch.cuda.mem_get_info(device)
    unused = 0
    # The job's own allocator may have no statistics.
    with contextlib.suppress(RuntimeError):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    usable = free + max(0, unused)
    largest = ring_nbytes(usable, total, asked)
    if notices is not None and asked is not None and asked > usable // 2:
        notices.warn(
            "ring_bytes",
            "a ring of %d bytes takes more than half of the memory that is free on the device. It has %d bytes. "
            "Lower CAPD_RING_BYTES",
            asked,
            largest,
        )
    return tuple(sorted({largest, ring_nbytes(free, total, asked), 0}, reverse=True))


def is_capturing(device: Optional[torch.device] = None) -> bool:
    """Return whether a CUDA graph is being captured on this thread's current stream of `device`.

    None: of the current device.
    """
    if device is None or device.index is None or torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    # torch asks the current device.
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def cuda_runtimes() -> list[Any]:
    """Return every CUDA runtime library that is mapped into this process. Wheels give theirs a hashed name."""
    return mapped_libraries("libcudart")


def mapped_libraries(prefix: str) -> list[Any]:
    """Return every library that is mapped into this process and whose file name begins with `prefix`."""
    paths: set[str] = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(prefix):
                paths.add("/" + path)
    libraries = []
    for path in sorted(paths):
        # The file may be gone or replaced by now.
        with contextlib.suppress(OSError):
            libraries.append(ctypes.CDLL(path))
    return libraries


_side_streams: dict[int, torch.cuda.Stream] = {}


def side_stream(index: int) -> torch.cuda.Stream:
    """Return capd's own stream on GPU `index`, one for the life of the process.

    torch has 32 streams and hands them out in turn. A job with many streams would get ours as well, and its kernels
    would wait for copies. If no stream can be created, one of torch's is returned, and the reason is logged at DEBUG.
    """
    # The stream is never destroyed. After a session, torch's allocator keeps the ring's memory for this stream. It may
    # wait for the stream when it releases the memory. The next session finds both.
    found = _side_streams.get(index)
    if found is None:
        try:
            with torch.cuda.device(torch.device("cuda", index)):
                handle = _new_stream(index)
            found = torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]  # torch's own lack
        except (OSError, RuntimeError) as error:
            logger.debug("capd: one of torch's streams is used on GPU %d: %s", index, error)
            return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]  # torch's own lack
        _side_streams[index] = found
    return found


def _new_stream(index: int) -> int:
    """Return the handle of a new stream of the current device, which must be `index` for the runtime, too."""
    problem = "no runtime library with the functions for it is mapped"
    for get_device, create in _functions("GetDevice", "StreamCreateWithFlags"):
        current, handle = ctypes.c_int(-1), ctypes.c_void_p()
        # In this thread, the runtime of another library may have another current device than torch's.
        if get_device(ctypes.byref(current)) or current.value != index:
            problem = f"GPU {current.value} is the current one of a runtime library"
        elif code := create(ctypes.byref(handle), _STREAM_NON_BLOCKING):
            problem = f"no stream could be created, error {int(code)}"
        elif handle.value:
            return handle.value
    raise RuntimeError(problem)


def _functions(*names: str) -> Iterator[tuple[Any, ...]]:
    """Yield these functions of every runtime that has all of them: CUDA's as cuda…, else ROCm's as hip…."""
    runtimes = [("cuda", runtime) for runtime in cuda_runtimes()]
    for prefix, runtime in runtimes or [("hip", runtime) for runtime in mapped_libraries("libamdhip64")]:
        found = tuple(getattr(runtime, prefix + name, None) for name in names)
        if all(found):
            yield found


def take_thread(device: torch.device) -> None:
    """Prepare a thread of capd: its CUDA calls concern `device` and break nobody's graph capture.

    A thread starts on GPU 0. Its first call, even the query of an event, would create a context there: half a gigabyte
    of a GPU that may be another rank's.
    """
    torch.cuda.set_device(device)
    _keep_out_of_captures()


def _keep_out_of_captures() -> None:
    """Ensure that no later call of this thread breaks a CUDA graph capture of another thread.

    In torch's default mode a capture forbids many calls to every thread of the process. It fails if one of them is
    made.
    """
    done = False
    for exchange in _exchanges_of_mode():
        mode = ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)
        done |= exchange(ctypes.byref(mode)) == 0
    if not done:
        _warn_of_captures()


def _exchanges_of_mode() -> list[Any]:
    """Return the functions that set a thread's capture mode, of all runtimes, else of the driver.

    If no runtime is mapped, it is part of another library. The mode is the driver's in any case.
    """
    name = "ThreadExchangeStreamCaptureMode"
    found = [exchange for (exchange,) in _functions(name)]
    return found or [
        exchange
        for driver in mapped_libraries("libcuda.so")
        if (exchange := getattr(driver, "cu" + name, None)) is not None
    ]


@functools.cache
def _warn_of_captures() -> None:
    RateLimitedLog().warn(
        "capture_mode",
        "capd's threads cannot keep out of the capture of CUDA graphs: neither a CUDA or HIP runtime library nor the "
        "driver takes their capture mode. A graph that the job captures at the same time may fail, unless with "
        'capture_error_mode="thread_local"',
    )


def pin(address: int, nbytes: int, device: torch.device) -> str | None:
    """Page-lock [address, address + nbytes) for `device` and all others. Return None, or the reason of a failure.

    No copy may cross from one registration into another. The call takes about a second per GiB: make it in a separate
    thread, after the pages are created. RLIMIT_MEMLOCK does not count, because the driver locks the pages, not
    mlock(2). A failure leaves no latched CUDA error, which would otherwise surface at somebody's next kernel launch.
    """
    if nbytes >= _MAX_REGISTER_NBYTES:
        return f"{nbytes} bytes cannot be registered at once, the limit is {_MAX_REGISTER_NBYTES}"
    # Without the guard, a context would be created on GPU 0.
    with torch.cuda.device(device):
        _keep_out_of_captures()
        code = int(_runtime().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
        if code:
            for (get_last_error,) in _functions("GetLastError"):
                get_last_error()
    return None if code == 0 else f"cudaHostRegister of {nbytes} bytes failed with error {code}"


def unpin(address: int, device: torch.device) -> None:
    """Undo `pin`. Needed before the memory is unmapped."""
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own lack
