"""Runs the jobs of the GPU tests on the CPU: memory of the device is the host's, its streams are threads.

A job imports it first. It shows that those tests run and that their figures come out; of CUDA it shows nothing.
What is computed is computed at once; ring and arena are written, and events and sleeps happen, in stream order.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capd_client.device import devices, snapshots
from capd_client.device.cuda import device as cuda_device
from capd_client.device.cuda import runtime
from capd_client.device.pieces import Piece
from capd_client.device.ring import RingMemory
from capd_client.explicit.static_tap import StaticTap
from capd_client.session import session
from capd_client.staging.describe import Described
from capd_client.staging.stager import Stager
from tests.kit.gpu import stand_in_streams as streams

_FREE_NBYTES = 1 << 30  # makes a ring of 51 MiB
_FACTORIES = ("arange", "empty", "full", "ones", "randn", "tensor", "zeros")

_rings: list[weakref.ref[torch.Tensor]] = []


class Generator(torch.Generator):
    """Of whatever device, on the host."""

    def __new__(cls, _device: object = None) -> Generator:
        return super().__new__(cls)


# -- tensors: whatever was not made on the host is taken for one on the device ----------------------


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _on_device(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor.clone() if hasattr(tensor, "on_host") else tensor


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type != "cuda":
            return make(*args, device=device, **more)  # torch's own, on "meta" as a rule
        tensor = make(*args, **more)
        if device is None:
            return _on_host(tensor)
        if device == streams.GPU:  # nobody else but the ring says it like this
            _rings.append(weakref.ref(tensor))
        return tensor

    return made


class DeviceFirst(Stager):
    """Sends what is not known to be on the host the way of device tensors."""

    def put_known(self, tensor: torch.Tensor, *args: Any) -> bool:
        return hasattr(tensor, "on_host") and super().put_known(tensor, *args)

    def put(self, described: Described) -> None:
        if hasattr(described.source, "on_host"):
            super().put(described)
        else:
            self._from_device.take(described)


# -- what goes to ring and arena, in stream order ---------------------------------------------------


def _fetch(self: Any, piece: Piece, arena: torch.Tensor) -> None:
    for event in piece.after:
        self._stream.wait_event(event)
    source, host = piece.source, piece.target(arena)
    if piece.nbytes and (
        piece.pinned or not self._bounce.bring(source, host, self._fetched_part, self._wait_for_part)
    ):
        self._stream.do(lambda: host.copy_(source))


def _fetched_part(self: Any, source: torch.Tensor, host: torch.Tensor) -> Any:
    self._stream.do(lambda: host.copy_(source))
    return self.fetched()


def _rows_in_order(fill: Callable[..., None]) -> Callable[..., None]:
    def filled(segments: Sequence[Any]) -> None:  # of the ring: they are there when the stream comes by
        streams.current_stream().do(functools.partial(fill, list(segments)))

    return filled


def _in_order(write: Callable[..., None]) -> Callable[..., None]:
    def written(self: Any, slot: Any, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        source = tensor.detach().clone()  # as it is now: that is when the stream would come to it
        streams.current_stream().do(lambda: write(self, slot, source, dtype))

    return written


def _row_in_order(fill: Callable[..., None]) -> Callable[..., None]:
    def filled(tensor: torch.Tensor, *more: Any) -> None:
        source = tensor.detach().clone()
        streams.current_stream().do(lambda: fill(source, *more))

    return filled


def _copy_of_tap(copy: Callable[..., None]) -> Callable[..., None]:
    def copied(self: Any, buffer: torch.Tensor, tensor: torch.Tensor, current: Any) -> None:
        copy(self, buffer, tensor, current)
        if streams.is_current_stream_capturing():
            streams.graph_here().add(lambda: buffer.copy_(tensor))

    return copied


def _allocated(*_: object) -> int:
    return sum(ring.nbytes for ring in (known() for known in _rings) if ring is not None)


# -- in place of torch.cuda -------------------------------------------------------------------------


def _install() -> None:
    nothing = contextlib.nullcontext
    for name, stand_in in {
        "Stream": streams.Stream, "ExternalStream": streams.external_stream, "Event": streams.Event,
        "CUDAGraph": streams.Graph, "graph": streams.capturing, "stream": streams.stream,
        "current_stream": streams.current_stream, "set_stream": streams.set_stream,
        "synchronize": streams.synchronize, "_sleep": streams._sleep, "graph_pool_handle": lambda: None,
        "is_current_stream_capturing": streams.is_current_stream_capturing, "set_sync_debug_mode": lambda *_: None,
        "device": lambda *_: nothing(), "device_of": lambda *_: nothing(), "set_device": lambda *_: None,
        "current_device": lambda: 0, "cudart": streams.Runtime, "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (_FREE_NBYTES, _FREE_NBYTES),
        "memory_allocated": _allocated, "memory_reserved": _allocated,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, stand_in)
    torch.cuda.graphs.graph_pool_handle = lambda: None  # type: ignore[assignment]
    torch._C._cuda_getCurrentRawStream = lambda _index: streams.current_stream().cuda_stream  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    to_host, module = torch.Tensor.cpu, torch.nn.Module
    torch.Generator = Generator  # type: ignore[misc]
    torch.Tensor.cpu = lambda self: _on_host(to_host(self).clone())  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = _on_device  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = lambda self: streams.is_locked(self.data_ptr())  # type: ignore[assignment,method-assign]
    module.cuda = lambda self: self  # type: ignore[method-assign,assignment,misc]
    _install_in_capd()


def _install_in_capd() -> None:
    stager = devices.Devices.stager
    cuda_device.CudaDevice.can_issue = lambda self: True  # type: ignore[method-assign]
    cuda_device.CudaDevice.query = lambda self, event: event.query()  # type: ignore[method-assign]
    cuda_device.CudaDevice.fetch = _fetch  # type: ignore[method-assign,assignment]
    cuda_device.CudaDevice._fetched_part = _fetched_part  # type: ignore[method-assign]
    cuda_device.fill_rows = _rows_in_order(cuda_device.fill_rows)
    runtime.cuda_runtimes = lambda: [streams.Runtime()]
    RingMemory.write = _in_order(RingMemory.write)  # type: ignore[method-assign]
    snapshots.fill_row = _row_in_order(snapshots.fill_row)
    StaticTap._copy = _copy_of_tap(StaticTap._copy)  # type: ignore[method-assign]
    devices.Devices.stager = lambda self, device: stager(self, streams.GPU)  # type: ignore[method-assign,misc]
    devices.is_capturing = cuda_device.is_capturing = runtime.is_capturing = lambda *_: (
        streams.is_current_stream_capturing()
    )
    session.Stager = DeviceFirst  # type: ignore[misc]


_install()
