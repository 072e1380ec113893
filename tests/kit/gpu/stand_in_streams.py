"""Streams, events, graphs and the runtime of the stand-in device: a stream is a queue with a thread of its own.

Names are those of torch.cuda where that has them. What is computed is computed at once; events, sleeps and what is
given to a stream happen when it gets to them.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "GPU", "Event", "Graph", "Runtime", "Stream", "capturing", "cudart", "current_stream", "external_stream",
    "graph_here", "is_current_stream_capturing", "is_locked", "set_stream", "stream", "synchronize",
]  # fmt: skip

GPU = torch.device("cuda", 0)
_CYCLES_PER_S = 1e9
_ALREADY_REGISTERED = 712

_here = threading.local()  # the current stream of each thread, and the graph that it captures
_replayed = threading.Event()  # sleeps end early when a graph is replayed
_locked: dict[int, int] = {}  # page-locked: address and length


class Stream:
    """Does what it is given, one after the other, in a thread of its own."""

    made: list[Stream] = []  # noqa: RUF012 - all of them, for `synchronize`
    device = GPU
    device_index = 0

    def __init__(self, *_: object, **__: object) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        Stream.made.append(self)
        self.cuda_stream = len(Stream.made) - 1  # the default stream is 0, as the real one is
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def do(self, what: Callable[[], object]) -> None:
        self._queue.put(what)

    def wait_event(self, event: Event) -> None:
        self.do(event.happened.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event().record(other))

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def query(self) -> bool:
        return self._queue.empty()

    def synchronize(self) -> None:
        Event().record(self).happened.wait()


class Event:
    """Happens when its stream comes by. One that was never recorded has happened, as a real one has."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.happened = threading.Event()
        self.happened.set()
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        # what waits for an earlier record goes on waiting for that one
        self.happened = happened = threading.Event()

        def happens() -> None:
            self._at = time.perf_counter()
            happened.set()

        (stream or current_stream()).do(happens)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.happened.wait()

    def query(self) -> bool:
        return self.happened.is_set()

    def elapsed_time(self, later: Event) -> float:
        return (later._at - self._at) * 1e3


_default = Stream()


def current_stream(_device: object = None) -> Stream:
    found: Stream = getattr(_here, "stream", _default)
    return found


def set_stream(now: Stream) -> None:
    _here.stream = now


def external_stream(handle: int, *_: object, **__: object) -> Stream:
    return Stream.made[handle]


@contextlib.contextmanager
def stream(other: Stream | None) -> Iterator[None]:
    before = current_stream()
    set_stream(other or before)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(_device: object = None) -> None:
    for each in list(Stream.made):
        each.synchronize()


def _sleep(cycles: int) -> None:
    _replayed.clear()
    current_stream().do(functools.partial(_replayed.wait, cycles / _CYCLES_PER_S))


class Graph(TorchDispatchMode):
    """A CUDA graph: what was computed while it was captured is computed again, into the same tensors."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self._steps: list[Callable[[], object]] = []

    def capture_begin(self, **_: object) -> None:
        _here.graph = self
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        _here.graph = None

    def replay(self) -> None:
        _replayed.set()
        for step in self._steps:
            step()

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(lambda: result if (now := func(*args, **kwargs)) is args[0] else result.copy_(now))
        return result


@contextlib.contextmanager
def capturing(graph: Graph, *_: object, **__: object) -> Iterator[None]:
    with stream(Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def is_current_stream_capturing() -> bool:
    return getattr(_here, "graph", None) is not None


def graph_here() -> Graph:
    """The graph that this thread captures."""
    graph: Graph = _here.graph
    return graph


def is_locked(address: int) -> bool:
    """Whether the byte at `address` is page-locked."""
    return any(at <= address < at + nbytes for at, nbytes in list(_locked.items()))


class Runtime:
    """libcudart, by torch's bindings and by ctypes."""

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        if any(start < address + nbytes and address < start + held for start, held in _locked.items()):
            return _ALREADY_REGISTERED
        _locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del _locked[address]
        return 0

    def cudaGetLastError(self) -> int:
        return 0

    cudaPeekAtLastError = cudaGetLastError

    def cudaThreadExchangeStreamCaptureMode(self, _mode: object) -> int:
        return 0

    def cudaGetDevice(self, index: Any) -> int:
        index._obj.value = 0
        return 0

    def cudaStreamCreateWithFlags(self, handle: Any, _flags: int) -> int:
        handle._obj.value = Stream().cuda_stream
        return 0


def cudart() -> Runtime:
    return Runtime()
