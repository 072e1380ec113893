"""CUDA's runtime called without torch: proved before it is used, never while pages are locked, and never trusted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capd_client.device.cuda import raw_calls
from capd_client.device.cuda.device import CudaDevice
from capd_client.device.cuda.raw_calls import DEVICE_TO_DEVICE, DEVICE_TO_HOST, RawCalls, find_raw_calls
from capd_client.device.pieces import Piece
from capd_client.device.ring import RingMemory
from capd_client.process.log import RateLimitedLog
from tests.kit.client.cuda import Gpus

DEVICE = torch.device("cuda", 1)


class Function:
    """A function of a library: ctypes sets its argtypes. code: what it reports."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self.argtypes: list[Any] = []
        self.code = 0

    def __call__(self, *args: int) -> int:
        if not self.code:
            self._call(*args)
        return self.code


class Runtime:
    """A libcudart whose device memory is the host's: copies happen at once. log: what was called."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.cleared = 0
        self.cudaMemcpyAsync = Function(self._copy)
        self.cudaEventRecord = Function(lambda event, stream: self.log.append(("record", event, stream)))
        self.cudaStreamWaitEvent = Function(lambda stream, event, _: self.log.append(("wait", stream, event)))
        self.cudaEventQuery = Function(lambda event: self.log.append(("query", event, self.mode)))
        self.mode = 0
        self.damage = False

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0

    def cudaThreadExchangeStreamCaptureMode(self, pointer: Any) -> int:
        mode = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
        self.mode, mode[0] = mode[0], self.mode
        return 0

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)
        if self.damage:
            ctypes.memset(target + nbytes - 1, 77, 1)
        self.log.append(("copy", nbytes, kind, stream))


@pytest.fixture
def runtime(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A machine with GPUs whose memory is the host's, and its runtime."""
    runtime = Runtime()
    for name in ("arange", "zeros", "empty"):
        make = getattr(torch, name)

        def made(*args: Any, make: Callable[..., torch.Tensor] = make, **more: Any) -> torch.Tensor:
            return make(*args, **{key: more[key] for key in more if key not in ("device", "pin_memory")})

        monkeypatch.setattr(torch, name, made)
    monkeypatch.setattr(raw_calls, "_runtimes", lambda: [runtime])
    return runtime


def made(busy: Callable[[], bool] = lambda: False, *, raw: bool = True) -> CudaDevice:
    """A device whose pump has begun, on another thread than this one."""
    device = CudaDevice(DEVICE, lambda _: 1 << 62, busy, RateLimitedLog(), raw=raw)
    assert not device.can_issue()  # nothing is tried on the thread that sets it up
    pump = threading.Thread(target=device.enter_thread)
    pump.start()
    pump.join()
    return device


def test_a_capture_goes_by_the_runtime_once_it_has_proved_itself(gpus: Gpus, runtime: Runtime) -> None:
    device = made()
    for event in (device.record(), device.fetched()):  # torch makes each event, at its first record
        device.recycle(event)
    runtime.log.clear()
    memory = RingMemory(torch.zeros(4096, dtype=torch.uint8))
    tensor, host = torch.randn(100), torch.zeros(400, dtype=torch.uint8)
    device.copy(memory, (64, 448, None), tensor, torch.float32)
    ready = device.record()
    device.fetch(Piece(memory.tensor, 64, 400, 0, (ready,)), host)
    done = device.fetched()

    assert torch.equal(host.view(torch.float32), tensor)
    here, side = gpus.default[1].cuda_stream, device._side
    assert runtime.log == [
        ("copy", 400, DEVICE_TO_DEVICE, here),
        ("record", ready.cuda_event, here),
        ("wait", side, ready.cuda_event),
        ("copy", 400, DEVICE_TO_HOST, side),
        ("record", done.cuda_event, side),
    ]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(8, 8).t(), torch.randn(8, 8)[:, :3], torch.randn(4, dtype=torch.complex64).conj().imag],
)
def test_what_is_not_bytes_to_bytes_is_torchs(runtime: Runtime, tensor: torch.Tensor) -> None:
    device = made()
    runtime.log.clear()
    for dtype in (tensor.dtype, torch.bfloat16):
        memory = RingMemory(torch.zeros(4096, dtype=torch.uint8))
        device.copy(memory, (0, 4096, None), tensor, dtype)
        expected = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
        assert torch.equal(memory.tensor[: expected.numel()], expected)
    assert runtime.log == []


@pytest.mark.parametrize("why", ["other bytes", "an error", "no time", "no such function", "sanitizer"])
def test_what_does_not_prove_itself_is_not_used(
    gpus: Gpus, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    runtime.damage = why == "other bytes"
    runtime.cudaMemcpyAsync.code = 1 if why == "an error" else 0
    if why == "no time":
        monkeypatch.setattr(raw_calls, "_TRIAL_S", 0.01)
        runtime.cudaEventQuery.code = 600
    elif why == "no such function":
        del runtime.cudaEventRecord
    elif why == "sanitizer":
        monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    device = made()
    assert device._raw is None
    assert (runtime.cleared > 0) == (why in ("an error", "no time"))
    device.recycle(device.record())
    runtime.log.clear()
    device.copy(RingMemory(torch.zeros(64, dtype=torch.uint8)), (0, 64, None), torch.ones(4), torch.float32)
    source, host = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    device.fetch(Piece(source, 0, 4, 0, (device.record(),)), host)
    assert runtime.log == []


def test_while_pages_are_locked_and_where_it_is_told_so_torch_calls(gpus: Gpus, runtime: Runtime) -> None:
    """The driver makes a call wait then, and this one would keep the interpreter's lock meanwhile."""
    busy = [False]
    device = made(lambda: busy[0])
    device.recycle(device.record())
    busy[0] = True
    runtime.log.clear()
    memory = RingMemory(torch.zeros(64, dtype=torch.uint8))
    device.copy(memory, (0, 64, None), torch.ones(4), torch.float32)
    device.record()
    assert runtime.log == []
    busy[0] = False
    device.copy(memory, (0, 64, None), torch.ones(4), torch.float32)
    assert [entry[0] for entry in runtime.log] == ["copy"]
    assert made(raw=False)._raw is None


def test_training_threads_ask_without_harm_to_graph_captures(gpus: Gpus, runtime: Runtime) -> None:
    """In the thread's own mode, which is put back; an event that has not happened leaves no error behind."""
    device = made()
    assert device.can_issue()
    device.recycle(device.record())
    event = device.record()
    runtime.log.clear()
    assert device.query(event)
    assert runtime.log == [("query", event.cuda_event, 1)]
    runtime.cleared, runtime.cudaEventQuery.code = 0, 600
    assert not device.query(event)
    assert (runtime.mode, runtime.cleared) == (0, 1)
    runtime.cudaEventQuery.code = 700
    with pytest.raises(RuntimeError, match="cudaEventQuery failed with error 700"):
        device.query(event)
    assert runtime.mode == 0


def test_the_default_stream_of_a_device_that_is_not_current_is_torchs(
    gpus: Gpus, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handle is 0, which the runtime takes for that of the current device."""
    device = made()
    for event in (device.record(), device.fetched()):
        device.recycle(event)
    monkeypatch.setattr(device, "stream", lambda: 0)
    runtime.log.clear()
    assert gpus.current == 0
    device.recycle(device.record())
    device.hold_back(device.fetched())
    memory = RingMemory(torch.zeros(64, dtype=torch.uint8))
    device.copy(memory, (0, 64, None), torch.ones(4), torch.float32)
    assert [entry[0] for entry in runtime.log] == ["record"]  # that on the side stream
    gpus.thread.index = 1
    device.copy(memory, (0, 64, None), torch.ones(4), torch.float32)
    assert runtime.log[-1] == ("copy", 16, DEVICE_TO_DEVICE, 0)


def test_what_could_not_be_tried_while_pages_were_locked_is_tried_later(gpus: Gpus, runtime: Runtime) -> None:
    """The pump does not wait for that: its copies go by torch until then."""
    busy = [True]
    device = made(lambda: busy[0])
    found = []

    def pump() -> None:
        device.enter_thread()
        for value in (True, False):
            busy[0] = value
            device.query(device.fetched())
            found.append(device.can_issue())

    thread = threading.Thread(target=pump)
    thread.start()
    thread.join()
    assert found == [False, True]


def test_a_training_thread_that_began_to_issue_goes_on_by_the_runtime(gpus: Gpus, runtime: Runtime) -> None:
    """Torch would copy on its current stream, and nothing would tell when that is done."""
    busy = [False]
    device = made(lambda: busy[0])
    assert device.can_issue()
    busy[0] = True  # locking of pages begins now
    runtime.log.clear()
    source, host = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    device.fetch(Piece(source, 0, 8, 0, ()), host)
    assert runtime.log == [("copy", 8, DEVICE_TO_HOST, device._side)]
    assert not device.can_issue()


def test_an_error_says_which_call_and_leaves_none_behind(runtime: Runtime) -> None:
    calls = RawCalls(runtime)
    runtime.cudaEventRecord.code = 700
    with pytest.raises(RuntimeError, match="cudaEventRecord failed with error 700"):
        calls.record(1, 2)
    assert runtime.cleared == 1


def test_without_a_runtime_there_are_none(gpus: Gpus) -> None:
    assert find_raw_calls(DEVICE, gpus.default[1], list) is None  # type: ignore[arg-type]
