"""What can be told of the CUDA side without a GPU: runtimes, capture mode, page lock, events, with torch.cuda faked."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, wait_until

from capd_client import cuda, pinning
from capd_client.arena import Arena
from capd_client.notices import Notices
from capd_client.pinning import Pinning
from capd_client.session import Session

GIB = 1 << 30
DEVICE = torch.device("cuda", 1)


class Runtime:
    """A libcudart: remembers its calls, swaps the capture mode as the real one does."""

    def __init__(self) -> None:
        self.mode = 0
        self.errors_cleared = 0

    def cudaThreadExchangeStreamCaptureMode(self, pointer: Any) -> int:
        mode = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
        self.mode, mode[0] = mode[0], self.mode
        return 0

    def cudaGetLastError(self) -> int:
        self.errors_cleared += 1
        return 0


class Cudart:
    """torch.cuda.cudart(): answers with `code`, remembers calls with the device that was current."""

    def __init__(self, current: list[torch.device], code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = code
        self._current = current

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags, self._current[-1]))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The stack of current devices."""
    stack: list[torch.device] = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        stack.append(chosen)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    found = [Runtime(), Runtime()]
    monkeypatch.setattr(cuda, "cuda_runtimes", lambda: found)
    return found


def use(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> Cudart:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


# -- page lock ----------------------------------------------------------------------------------------------


def test_the_arena_is_registered_once_for_all_devices(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device], runtimes: list[Runtime]
) -> None:
    cudart = use(monkeypatch, Cudart(current))

    assert cuda.pin(4096, GIB, DEVICE) is None
    cuda.unpin(4096)

    assert cudart.calls == [("register", 4096, GIB, 1, DEVICE), ("unregister", 4096)]  # 1: portable
    assert [runtime.errors_cleared for runtime in runtimes] == [0, 0]


def test_a_failure_says_why_and_leaves_no_latched_error_in_any_runtime(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device], runtimes: list[Runtime]
) -> None:
    use(monkeypatch, Cudart(current, code=712))

    problem = cuda.pin(4096, GIB, DEVICE)

    assert problem is not None
    assert "712" in problem
    assert [runtime.errors_cleared for runtime in runtimes] == [1, 1]


def test_half_a_tebibyte_is_not_even_tried(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device], runtimes: list[Runtime]
) -> None:
    cudart = use(monkeypatch, Cudart(current))

    problem = cuda.pin(4096, 512 * GIB, DEVICE)

    assert problem is not None
    assert "limit" in problem
    assert cudart.calls == []
    assert cuda.pin(4096, 512 * GIB - 4096, DEVICE) is None


def test_the_threads_of_capd_stay_out_of_graph_captures_in_every_runtime(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device], runtimes: list[Runtime]
) -> None:
    cuda.keep_out_of_captures()
    assert [runtime.mode for runtime in runtimes] == [1, 1]  # thread-local

    for runtime in runtimes:
        runtime.mode = 0
    use(monkeypatch, Cudart(current))
    cuda.pin(4096, GIB, DEVICE)  # registering is forbidden during a capture as well
    assert [runtime.mode for runtime in runtimes] == [1, 1]


def test_every_mapped_runtime_is_found_whatever_its_name_ends_with(tmp_path: Path) -> None:
    """Two real libraries under the names that wheels and toolkits use, one of them deleted after it was mapped."""
    code = """
import ctypes, os, sys
from capd_client.cuda import cuda_runtimes
assert cuda_runtimes() == []
for path in sys.argv[1:]:
    ctypes.CDLL(path)
assert [runtime._name for runtime in cuda_runtimes()] == sys.argv[1:], cuda_runtimes()
os.unlink(sys.argv[1])
assert [runtime._name for runtime in cuda_runtimes()] == sys.argv[2:], cuda_runtimes()
"""
    library = next(
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libm.so" in line or "/libm-" in line
    )
    paths = [tmp_path / "a b" / "libcudart-d0da41ae.so.11.0", tmp_path / "libcudart.so.12"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        shutil.copy(library, path)

    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, timeout=100)


# -- the pin thread -----------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    arena.prefault()
    yield arena
    arena.close()


class Driver:
    """Stands for the registration: waits while `busy` is set, notes what happened in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: str | None = None) -> None:
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self._problem = problem
        monkeypatch.setattr(pinning, "pin", self._pin)
        monkeypatch.setattr(pinning, "unpin", lambda address: self.events.append("unpin"))

    def _pin(self, address: int, nbytes: int, device: torch.device) -> str | None:
        self.threads.add(threading.current_thread().name)
        self.events.append("pin")
        assert self.go.wait(30)
        return self._problem

    def release(self) -> None:
        self.events.append("release")


def ended() -> bool:
    return not any(thread.name == "capd-pin" for thread in threading.enumerate())


def test_it_is_done_once_in_a_thread_of_its_own_behind_prefaulting(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    driver = Driver(monkeypatch)
    pin = Pinning(arena, Notices())
    assert not pin.pinned()
    pin.start(DEVICE)
    pin.start(torch.device("cuda", 0))
    wait_until(pin.pinned)
    assert arena.prefaulted(0)
    assert driver.events == ["pin"]
    assert driver.threads == {"capd-pin"}

    pin.close(driver.release)
    assert driver.events == ["pin", "unpin", "release"]
    assert ended()


@pytest.mark.parametrize("problem", ["cudaHostRegister failed with error 2", None])
def test_a_failure_is_one_warning_and_nothing_to_undo(
    monkeypatch: pytest.MonkeyPatch, arena: Arena, problem: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch, problem)
    if problem is None:

        def broken(*_: object) -> None:
            raise RuntimeError("CUDA driver error: initialization failed")

        monkeypatch.setattr(pinning, "pin", broken)
    pin = Pinning(arena, Notices())
    pin.start(DEVICE)
    wait_until(ended)

    assert not pin.pinned()
    assert "the arena is not pinned" in caplog.text
    pin.close(driver.release)
    assert driver.events[-1] == "release"
    assert "unpin" not in driver.events


def test_leaving_does_not_wait_for_a_lock_that_takes_long_and_it_is_undone_later(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    monkeypatch.setattr(pinning, "_JOIN_S", 0.01)
    driver = Driver(monkeypatch)
    driver.go.clear()
    pin = Pinning(arena, Notices())
    pin.start(DEVICE)
    wait_until(lambda: driver.events)

    pin.close(driver.release)
    assert driver.events == ["pin"]  # registering cannot be interrupted, and nobody waits for it
    driver.go.set()
    wait_until(ended)
    assert driver.events == ["pin", "unpin", "release"]


def test_closed_before_the_pages_are_there_it_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 20)  # nobody prefaults it
    driver = Driver(monkeypatch)
    pin = Pinning(arena, Notices())
    pin.start(DEVICE)
    pin.close(lambda: (driver.release(), arena.close()))  # type: ignore[func-returns-value]
    assert ended()
    assert driver.events == ["release"]
    pin.start(DEVICE)
    assert ended()


def test_a_job_that_ends_while_its_arena_is_being_locked_ends_at_once(
    peer: Peer, job_env: dict[str, str]
) -> None:
    code = """
import threading, torch, capd_client
from capd_client import pinning
begun = threading.Event()
def pin(*_):
    begun.set()
    threading.Event().wait()
pinning.pin = pin
capd_client.capture(torch.ones(4), tensor_name="x")
capd_client.api.session().devices._pinning.start(torch.device("cuda"))
assert begun.wait(30)
"""
    subprocess.run([sys.executable, "-c", code], env=job_env, check=True, timeout=60)
    wait_until(lambda: peer.byes == 1)


def test_a_session_unmaps_its_arena_behind_the_undone_lock(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_JOIN_S", 0.01)
    driver = Driver(monkeypatch)
    session = make_session()
    start = f"{session.arena.address:x}-"

    def is_mapped() -> bool:
        return any(line.startswith(start) for line in Path("/proc/self/maps").read_text().splitlines())

    mapped: list[bool] = []
    monkeypatch.setattr(pinning, "unpin", lambda address: mapped.append(is_mapped()))
    driver.go.clear()
    session.devices._pinning.start(DEVICE)
    wait_until(lambda: driver.events)
    session.close()
    assert is_mapped()
    driver.go.set()
    wait_until(ended)
    assert mapped == [True]
    assert not is_mapped()


# -- the device ---------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, index: int) -> None:
        self.index = index
        self.log: list[str] = []

    def wait_event(self, event: Event) -> None:
        self.log.append(f"wait {event.recorded_on}")


class Event:
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.recorded_on = ""

    def record(self, stream: Stream) -> None:
        self.recorded_on = f"stream of {stream.index}"
        stream.log.append("record")

    def query(self) -> int:
        return 1


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch.cuda with streams and events that only note what they are told."""
    state: dict[str, Any] = {"side": [], "current": Stream(1), "free": GIB}
    monkeypatch.setattr(Event, "made", 0)

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        state["side"].append(chosen)
        yield
        state["side"].pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: state["current"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (state["free"], 80 * GIB))
    return state


def test_a_fetch_waits_for_all_its_events_on_the_side_stream_and_copies(fake_cuda: dict[str, Any]) -> None:
    pinned = False
    device = cuda.CudaDevice(DEVICE, lambda: pinned)
    events = [device.record(), device.record()]
    source, host = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    assert device.pinned is False
    device.fetch(source, host, events)
    done = device.fetched()

    assert torch.equal(source, host)
    assert fake_cuda["side"] == []
    assert device._stream.log == ["wait stream of 1", "wait stream of 1", "record"]  # type: ignore[attr-defined]
    assert done.recorded_on == "stream of 1"
    assert device.query(done) is True
    pinned = True
    assert device.pinned is True


def test_events_are_used_again(fake_cuda: dict[str, Any]) -> None:
    device = cuda.CudaDevice(DEVICE, lambda: True)
    for _ in range(100):
        events = [device.record(), device.fetched()]
        for event in events:
            device.recycle(event)
    assert Event.made == 2


def test_the_ring_comes_from_the_side_streams_pool_and_may_be_empty(
    fake_cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    asked: list[tuple[int, int, torch.device]] = []

    def allocate(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((nbytes, len(fake_cuda["side"]), device))
        if nbytes > 1 << 20:
            raise torch.cuda.OutOfMemoryError
        return empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    device = cuda.CudaDevice(DEVICE, lambda: True)
    assert device.allocate_ring().numel() == 0
    fake_cuda["free"] = 10 << 20
    assert device.allocate_ring().numel() == 524288
    assert [(side, where) for _, side, where in asked] == [(1, DEVICE)] * 3
