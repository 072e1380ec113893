"""What can be told of the CUDA side without a GPU: runtimes, capture mode, page lock, streams; torch.cuda is faked."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from capd_client.device.cuda import runtime as cuda
from tests.kit.client.cuda import GIB, FakeStream, Gpus

DEVICE = torch.device("cuda", 1)


# -- page lock ----------------------------------------------------------------------------------------------


def test_the_arena_is_registered_once_for_all_devices(gpus: Gpus) -> None:
    assert cuda.pin(4096, GIB, DEVICE) is None
    assert gpus.registered == [(4096, GIB, 1)]  # 1: portable
    cuda.unpin(4096, DEVICE)

    assert gpus.registered == []
    assert gpus.contexts == {1}
    assert gpus.current == 0
    assert [runtime.errors_cleared for runtime in gpus.runtimes] == [0, 0]


def test_a_failure_says_why_and_leaves_no_latched_error_in_any_runtime(gpus: Gpus) -> None:
    gpus.code = 712

    problem = cuda.pin(4096, GIB, DEVICE)

    assert problem is not None
    assert "712" in problem
    assert [runtime.errors_cleared for runtime in gpus.runtimes] == [1, 1]
    assert gpus.contexts == {1}


def test_half_a_tebibyte_is_not_even_tried(gpus: Gpus) -> None:
    problem = cuda.pin(4096, 512 * GIB, DEVICE)

    assert problem is not None
    assert "limit" in problem
    assert gpus.calls == []
    assert cuda.pin(4096, 512 * GIB - 4096, DEVICE) is None


def test_the_threads_of_capd_stay_out_of_graph_captures_in_every_runtime(gpus: Gpus) -> None:
    cuda.take_thread(DEVICE)
    assert [runtime.mode for runtime in gpus.runtimes] == [1, 1]  # thread-local

    for runtime in gpus.runtimes:
        runtime.mode = 0
    cuda.pin(4096, GIB, DEVICE)  # registering is forbidden during a capture as well
    assert [runtime.mode for runtime in gpus.runtimes] == [1, 1]


class Library:
    """A library without CUDA's runtime in it: swaps the capture mode under a name of its own, answering `code`."""

    def __init__(self, name: str, code: int = 0) -> None:
        self.modes: list[int] = []
        self.last_errors = 0
        self.code = code
        setattr(self, name + "ThreadExchangeStreamCaptureMode", self._exchange)
        setattr(self, name + "GetLastError", self._get_last_error)

    def _exchange(self, pointer: Any) -> int:
        self.modes.append(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0])
        return self.code

    def _get_last_error(self) -> int:
        self.last_errors += 1
        return 0


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The libraries of a process by the beginning of their names."""
    libraries: dict[str, list[Any]] = {}
    monkeypatch.setattr(cuda, "mapped_libraries", lambda prefix: libraries.get(prefix, []))
    cuda._warn_of_captures.cache_clear()
    return libraries


@pytest.mark.parametrize(("prefix", "name"), [("libcuda.so", "cu"), ("libamdhip64", "hip")])
def test_without_a_runtime_library_the_drivers_and_rocms_take_the_capture_mode(
    gpus: Gpus,
    mapped: dict[str, list[Any]],
    prefix: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus.runtimes.clear()
    library = Library(name)
    mapped[prefix] = [library]
    cuda.take_thread(DEVICE)
    assert library.modes == [1]
    assert caplog.records == []

    gpus.code = 2
    assert cuda.pin(4096, GIB, DEVICE) is not None
    assert library.last_errors == (1 if name == "hip" else 0)  # the driver keeps none


@pytest.mark.parametrize("there", ["nothing", "a driver that refuses", "a library without the function"])
def test_where_no_library_takes_the_capture_mode_it_is_said_once(
    gpus: Gpus, mapped: dict[str, list[Any]], there: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.runtimes.clear()
    if there != "nothing":
        mapped["libcuda.so"] = [Library("cu", code=3)] if "refuses" in there else [object()]
    for _ in range(3):
        cuda.take_thread(DEVICE)
    assert [record.getMessage()[:59] for record in caplog.records] == [
        "capd: capd's threads cannot keep out of the capture of CUDA"
    ]


class Streams:
    """A runtime that makes streams on the device that it takes for the current one."""

    def __init__(self, current: int = 1, code: int = 0) -> None:
        self.made: list[int] = []
        self._current, self._code = current, code

    def cudaGetDevice(self, pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = self._current
        return 0

    def cudaStreamCreateWithFlags(self, pointer: Any, flags: int) -> int:
        self.made.append(flags)
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = 0x5000
        return self._code

    hipGetDevice, hipStreamCreateWithFlags = cudaGetDevice, cudaStreamCreateWithFlags


@pytest.fixture
def external(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Handle and device of the streams that torch was given."""
    given: list[tuple[int, int]] = []

    def wrap(handle: int, device: int) -> tuple[str, int]:
        given.append((handle, device))
        return ("external", handle)

    monkeypatch.setattr(torch.cuda, "ExternalStream", wrap)
    monkeypatch.setattr(cuda, "_side_streams", {})
    return given


def test_the_side_stream_is_capds_own_and_the_same_for_every_session(
    gpus: Gpus, external: list[tuple[int, int]]
) -> None:
    foreign, own = Streams(current=0), Streams()
    gpus.runtimes[:] = [foreign, own]  # type: ignore[list-item]
    assert cuda.side_stream(1) == ("external", 0x5000)
    assert cuda.side_stream(1) is cuda.side_stream(1)
    assert (foreign.made, own.made) == ([], [1])  # 1: it does not wait for the default stream
    assert external == [(0x5000, 1)]
    assert gpus.current == 0


def test_rocm_makes_the_side_stream_too(
    gpus: Gpus, external: list[tuple[int, int]], mapped: dict[str, list[Any]]
) -> None:
    gpus.runtimes.clear()
    mapped["libamdhip64"] = [Streams()]
    assert cuda.side_stream(1) == ("external", 0x5000)


@pytest.mark.parametrize(
    ("runtimes", "reason"),
    [
        ([], "no runtime library"),
        ([object()], "no runtime library"),
        ([Streams(current=0)], "GPU 0 is the current one"),
        ([Streams(code=2)], "error 2"),
    ],
)
def test_without_a_stream_of_its_own_it_is_one_of_torchs_and_why_is_logged(
    gpus: Gpus,
    external: list[tuple[int, int]],
    mapped: dict[str, list[Any]],
    runtimes: list[Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus.runtimes[:] = runtimes
    with caplog.at_level(logging.DEBUG, "capd_client"):
        stream: Any = cuda.side_stream(1)
    assert isinstance(stream, FakeStream)
    assert stream.index == 1
    assert external == []
    assert reason in caplog.text


@pytest.mark.slow
def test_every_mapped_runtime_is_found_whatever_its_name_ends_with(tmp_path: Path) -> None:
    """Two real libraries under the names that wheels and toolkits use, one of them deleted after it was mapped."""
    code = """
import ctypes, os, sys
from capd_client.device.cuda.runtime import cuda_runtimes
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
