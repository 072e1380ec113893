"""Runs the jobs of the GPU tests on the CPU: streams are queues with a thread each, memory of the device is the host's.

A job imports it first. It shows that those tests run and that their figures come out; of CUDA it shows nothing.
What is computed is computed at once; copies to the arena, events and sleeps happen when their stream gets to them.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from capd_client import cuda, devices, session
from capd_client.replays import StaticTap
from capd_client.staging import Stager

_GPU = torch.device("cuda", 0)
_FREE_NBYTES = 8 << 30
_ALREADY_REGISTERED = 712
_FACTORIES = ("arange", "empty", "full", "ones", "randn", "tensor", "zeros")

_here = threading.local()  # the current stream of each thread, and the graph that it captures
_slept = threading.Event()  # sleeps last until a graph is replayed
_rings: list[torch.Tensor] = []
_locked: dict[int, int] = {}  # page-locked: address and length


class Stream:
    """Does what it is given, one after the other, in a thread of its own."""

    made: list[Stream] = []  # noqa: RUF012 - all of them, for `synchronize`
    device = _GPU

    def __init__(self, *_: object) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()
        Stream.made.append(self)

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def do(self, what: Callable[[], object]) -> None:
        self._queue.put(what)

    def wait_event(self, event: Event) -> None:
        self.do(event.happened.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event().record(other))

    def synchronize(self) -> None:
        Event().record(self).happened.wait()


class Event:
    """Happens when its stream comes by."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def record(self, stream: Stream | None = None) -> Event:
        self.happened = threading.Event()
        (stream or current_stream()).do(self.happened.set)
        return self

    def query(self) -> bool:
        return self.happened.is_set()


_default = Stream()


def current_stream(_device: object = None) -> Stream:
    stream: Stream = getattr(_here, "stream", _default)
    return stream


def set_stream(stream: Stream) -> None:
    _here.stream = stream


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before = current_stream()
    set_stream(stream)
    yield
    set_stream(before)


def synchronize(_device: object = None) -> None:
    for stream in list(Stream.made):
        stream.synchronize()


class Graph(TorchDispatchMode):
    """A CUDA graph: what was computed while it was captured is computed again, into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], object]] = []

    def capture_begin(self, **_: object) -> None:
        _here.graph = self
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        _here.graph = None

    def replay(self) -> None:
        _slept.set()
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
def capturing(graph: Graph) -> Iterator[None]:
    with on_stream(Stream()):
        graph.capture_begin()
        yield
        graph.capture_end()


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


class Generator(torch.Generator):
    """Of whatever device, on the host."""

    def __new__(cls, _device: object = None) -> Generator:
        return super().__new__(cls)


# -- tensors: whatever was not made on the host is taken for one on the device ----------------------


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        tensor = make(*args, **more)
        if device is None:
            return _on_host(tensor)
        if device == _GPU:  # nobody else but the ring says it like this
            _rings.append(tensor)
        return tensor

    return made


class DeviceFirst(Stager):
    """Sends what is not known to be on the host the way of device tensors."""

    def _stage_known(self, tensor: torch.Tensor, *args: Any) -> bool:
        return hasattr(tensor, "on_host") and super()._stage_known(tensor, *args)

    def _stage(self, tensor: torch.Tensor, *args: Any) -> None:
        *_, self._immutable, _store = args
        super()._stage(tensor, *args)

    def _from_host(self, source: torch.Tensor, *args: Any) -> None:
        if hasattr(source, "on_host"):
            super()._from_host(source, *args)
        else:
            self._device_way.take(source, *args, self._immutable)


def _fetch(self: Any, source: torch.Tensor, host: torch.Tensor, after: Sequence[Event]) -> None:
    for event in after:
        self._stream.wait_event(event)
    self._stream.do(lambda: host.copy_(source))


def _copy_of_tap(copy: Callable[..., None]) -> Callable[..., None]:
    def copied(self: Any, buffer: torch.Tensor, tensor: torch.Tensor, current: Any) -> None:
        copy(self, buffer, tensor, current)
        if _is_capturing():
            _here.graph.add(lambda: buffer.copy_(tensor))

    return copied


def _sleep(_cycles: int) -> None:
    _slept.clear()
    current_stream().do(_slept.wait)


def _is_capturing() -> bool:
    return getattr(_here, "graph", None) is not None


def _install() -> None:
    nothing = contextlib.nullcontext
    stager = devices.Devices.stager
    to_host, module = torch.Tensor.cpu, torch.nn.Module
    for name, stand_in in {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": capturing, "stream": on_stream,
        "current_stream": current_stream, "set_stream": set_stream, "synchronize": synchronize,
        "device": lambda *_: nothing(), "device_of": lambda *_: nothing(), "set_device": lambda *_: None,
        "cudart": Runtime, "is_current_stream_capturing": _is_capturing, "set_sync_debug_mode": lambda *_: None,
        "mem_get_info": lambda *_: (_FREE_NBYTES, _FREE_NBYTES),
        "memory_allocated": lambda *_: sum(ring.nbytes for ring in _rings),
        "_sleep": _sleep,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, stand_in)
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.Generator = Generator  # type: ignore[misc]
    torch.Tensor.cpu = lambda self: _on_host(to_host(self).clone())  # type: ignore[assignment,method-assign]
    torch.Tensor.is_pinned = lambda self: any(  # type: ignore[assignment,method-assign]
        at <= self.data_ptr() < at + nbytes for at, nbytes in _locked.items()
    )
    module.cuda = lambda self: self  # type: ignore[method-assign,assignment,misc]
    cuda.CudaDevice.fetch = _fetch  # type: ignore[method-assign,assignment]
    cuda.cuda_runtimes = lambda: [Runtime()]
    StaticTap._copy = _copy_of_tap(StaticTap._copy)  # type: ignore[method-assign]
    devices.Devices.stager = lambda self, device: stager(self, _GPU)  # type: ignore[method-assign,misc]
    devices.is_capturing = cuda.is_capturing = _is_capturing
    session.Stager = DeviceFirst  # type: ignore[misc]


_install()
