"""torch.cuda of a machine with several GPUs, as far as capd calls it, on a machine without one.

Each thread has a current device, GPU 0 at first, and a current stream on each. Whatever the CUDA runtime is asked for
makes a context on the current device of the thread, as the real one does; guards of torch make none.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from capd_client.device.cuda import runtime

GIB = 1 << 30


@dataclass(eq=False)
class FakeStream:
    gpus: Gpus
    index: int
    log: list[str] = field(default_factory=list)

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"wait {event.recorded_on}")

    def wait_stream(self, stream: FakeStream) -> None:
        self.log.append(f"wait stream of {stream.index}")


@dataclass(eq=False)
class FakeEvent:
    gpus: Gpus
    recorded_on: str = ""

    @property
    def cuda_event(self) -> int:
        return id(self) if self.recorded_on else 0

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = f"stream of {stream.index}"
        stream.log.append("record")

    def query(self) -> int:
        self.gpus.call("query")
        return 1

    def synchronize(self) -> None:
        self.gpus.call("synchronize")


@dataclass
class FakeRuntime:
    """A libcudart as ctypes loads it: swaps the capture mode as the real one does."""

    gpus: Gpus
    mode: int = 0
    errors_cleared: int = 0

    def cudaThreadExchangeStreamCaptureMode(self, pointer: Any) -> int:
        self.gpus.call("mode")
        mode = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
        self.mode, mode[0] = mode[0], self.mode
        return 0

    def cudaGetLastError(self) -> int:
        self.gpus.call("last error")
        self.errors_cleared += 1
        return 0


class Gpus:
    """The machine. free: bytes free on each GPU. unused: those that torch's allocator holds besides, for nobody.

    code: what cudaHostRegister answers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: set[int] = set()
        self.calls: list[tuple[str, int]] = []  # what was called with which device current
        self.registered: list[tuple[int, int, int]] = []
        self.events_made = 0
        self.free = GIB
        self.unused = 0
        self.code = 0
        self.capturing: set[int] = set()  # devices on whose current streams a graph is captured
        self.runtimes = [FakeRuntime(self), FakeRuntime(self)]
        self.thread = threading.local()
        self.default = [FakeStream(self, index) for index in range(2)]
        for name in ("set_device", "device", "stream", "set_stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current in self.capturing)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda index: FakeStream(self, index))
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (self.free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: GIB + self.unused)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: GIB)
        monkeypatch.setattr(runtime, "cuda_runtimes", lambda: self.runtimes)

    @property
    def current(self) -> int:
        """The current device of this thread."""
        return getattr(self.thread, "index", 0)

    def call(self, name: str) -> None:
        """The runtime is asked for something in this thread."""
        self.calls.append((name, self.current))
        self.contexts.add(self.current)

    def current_stream(self, index: int) -> FakeStream:
        stream: FakeStream = getattr(self.thread, f"stream{index}", self.default[index])
        return stream

    def set_device(self, device: torch.device) -> None:
        self.thread.index = device.index
        self.call("set device")

    def set_stream(self, stream: FakeStream) -> None:
        if self.current != stream.index:
            self.set_device(torch.device("cuda", stream.index))
        setattr(self.thread, f"stream{stream.index}", stream)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.thread.index = self.current, device.index
        try:
            yield
        finally:
            self.thread.index = before

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """As in torch: the way back to another device goes by `set_stream`, which makes a context there."""
        source, destination = self.current_stream(self.current), self.current_stream(stream.index)
        self.set_stream(stream)
        yield
        if source.index != stream.index:
            self.set_stream(destination)
        self.set_stream(source)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.call("register")
        if not self.code:
            self.registered.append((address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.call("unregister")
        self.registered = [lock for lock in self.registered if lock[0] != address]
        return 0

    def _event(self, *, blocking: bool) -> FakeEvent:
        assert blocking  # or a thread that waits for it takes a core
        self.events_made += 1
        return FakeEvent(self)
