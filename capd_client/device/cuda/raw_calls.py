"""The calls of CUDA's runtime that a capture makes, without torch around them: a third of the host's time.

On a GPU they are used only after a trial has shown that they do the same as torch's calls. They are never used while
capd locks pages: they keep the interpreter's lock, and the driver makes every call wait during that time.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any, Optional

import torch

from capd_client.device.cuda.runtime import cuda_runtimes

__all__ = ["DEVICE_TO_DEVICE", "DEVICE_TO_HOST", "RawCalls", "find_raw_calls"]

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3
_CAPTURE_MODE_THREAD_LOCAL = 1
_NOT_READY = 600
_TRIAL_NBYTES = 4096
# A device that is busy for longer at its setup is not tried.
_TRIAL_S = 1.0

_unfinished: list[tuple[torch.Tensor, torch.Tensor]] = []


class RawCalls:
    """The functions of one runtime library. Each raises RuntimeError if it reports an error.

    Handles are the numbers of torch's streams and events (`cuda_stream`, `cuda_event`). Addresses count bytes.
    """

    def __init__(self, runtime: Any) -> None:
        pointer, size, code = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._last_error = runtime.cudaGetLastError
        self._copy = runtime.cudaMemcpyAsync
        self._record = runtime.cudaEventRecord
        self._wait = runtime.cudaStreamWaitEvent
        self._copy.argtypes = [pointer, pointer, size, code, pointer]
        self._record.argtypes = [pointer, pointer]
        self._wait.argtypes = [pointer, pointer, ctypes.c_uint]
        self._query = runtime.cudaEventQuery
        self._query.argtypes = [pointer]
        self._exchange = runtime.cudaThreadExchangeStreamCaptureMode

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        """Call cudaMemcpyAsync for `nbytes`. kind: DEVICE_TO_HOST or DEVICE_TO_DEVICE."""
        code = self._copy(target, source, nbytes, kind, stream)
        if code:
            self._fail("cudaMemcpyAsync", code)

    def record(self, event: int, stream: int) -> None:
        """Call cudaEventRecord."""
        code = self._record(event, stream)
        if code:
            self._fail("cudaEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """Call cudaStreamWaitEvent."""
        code = self._wait(stream, event, 0)
        if code:
            self._fail("cudaStreamWaitEvent", code)

    def query(self, event: int) -> bool:
        """Call cudaEventQuery. In torch's default capture mode, it would end a graph capture of another thread."""
        mode = ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)
        self._exchange(ctypes.byref(mode))
        try:
            code = self._query(event)
        finally:
            self._exchange(ctypes.byref(mode))
        if code == _NOT_READY:
            self._last_error()
        elif code:
            self._fail("cudaEventQuery", code)
        return not code

    def _fail(self, name: str, code: int) -> None:
        # Otherwise the error would surface at the job's next launch.
        self._last_error()
        raise RuntimeError(f"{name} failed with error {code}")


def find_raw_calls(
    device: torch.device,
    stream: torch.cuda.Stream,
    runtimes: Optional[Callable[[], list[Any]]] = None,
) -> Optional[RawCalls]:
    """Return calls that passed the trial on `device`; None if there are none. Never raises.

    They are not used under TORCH_CUDA_SANITIZER, which would not see them.

    Args:
        device: The GPU.
        stream: The stream of the trial.
        runtimes: Returns the runtime libraries to try; by default the mapped ones.
    """
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        return None
    try:
        for runtime in (_runtimes if runtimes is None else runtimes)():
            calls = RawCalls(runtime)
            if _prove(calls, device, stream):
                return calls
    except Exception:
        # The job will see a device error itself. torch's calls go on.
        return None
    return None


def _runtimes() -> list[Any]:
    """Return the mapped runtimes, opened so that their functions keep the interpreter's lock."""
    return [ctypes.PyDLL(runtime._name) for runtime in cuda_runtimes()]


def _prove(calls: RawCalls, device: torch.device, stream: torch.cuda.Stream) -> bool:
    """Return whether these calls copy bytes to the host, in the order that their events require."""
    with torch.cuda.device(device), torch.cuda.stream(stream):
        source = torch.arange(_TRIAL_NBYTES, dtype=torch.int64, device=device).mul_(167).to(torch.uint8)
        target = torch.zeros_like(source)
        host = torch.zeros(_TRIAL_NBYTES, dtype=torch.uint8, pin_memory=True)
        events: list[Any] = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's own lack
        for event in events:
            # torch creates an event at its first record.
            event.record(stream)
    handle = stream.cuda_stream
    calls.copy(target.data_ptr(), source.data_ptr(), _TRIAL_NBYTES, DEVICE_TO_DEVICE, handle)
    calls.record(events[0].cuda_event, handle)
    calls.wait(handle, events[0].cuda_event)
    calls.copy(host.data_ptr(), target.data_ptr(), _TRIAL_NBYTES, DEVICE_TO_HOST, handle)
    calls.record(events[1].cuda_event, handle)
    deadline = time.monotonic() + _TRIAL_S
    while not calls.query(events[1].cuda_event):
        if time.monotonic() > deadline:
            # The device may still write to them.
            _unfinished.append((target, host))
            return False
        time.sleep(0.001)
    expected = torch.arange(_TRIAL_NBYTES, dtype=torch.int64).mul_(167).to(torch.uint8)
    return torch.equal(host, expected)
