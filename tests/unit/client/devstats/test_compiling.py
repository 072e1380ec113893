"""The process that compiles the kernels of a GPU: what it is told, what it must not do, and how it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from capd_client.devstats import compiling, prepare, prepared
from capd_client.rowkernel.artifacts import cache_directory, mark_of

TARGET = "cuda:90:32"
MakePython = Callable[[str], None]


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Triton would keep what is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePython:
    """Puts a shell script in the place of the interpreter: no Triton is needed to start a process and to end it."""

    def put(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_process_sees_no_gpu_and_captures_nothing(
    python: MakePython, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPD_ENDPOINT", "/tmp/capd.sock")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.syspath_prepend(str(tmp_path / "job"))
    look = (
        "input=$(readlink /proc/$$/fd/0); output=$(readlink /proc/$$/fd/1); errors=$(readlink /proc/$$/fd/2)"
    )
    python(f'{look}\necho $input $output $errors > streams\nenv > environment; echo "$@" > arguments')

    with pytest.raises(RuntimeError, match="ended with code 0"):  # it has compiled nothing
        compiling.compile_ahead(TARGET, ["bfloat16", "float32"], never)

    lines = (tmp_path / "environment").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert [name for name in found if name.startswith("CAPD_")] == []
    assert found["CUDA_VISIBLE_DEVICES"] == found["HIP_VISIBLE_DEVICES"] == ""
    assert found["TRITON_CACHE_DIR"] == str(cache)
    assert str(tmp_path / "job") in found["PYTHONPATH"].split(os.pathsep)
    assert (tmp_path / "streams").read_text().split() == ["/dev/null"] * 3
    assert (tmp_path / "arguments").read_text().split() == [
        "-m", "capd_client.rowkernel.compile", "--target", TARGET, "--dtypes", "bfloat16,float32",
    ]  # fmt: skip


def test_what_the_cache_holds_is_not_compiled_again(python: MakePython, tmp_path: Path, cache: Path) -> None:
    python(f'printf "%s\\n" "$@" >> arguments; touch {mark_of(TARGET, "float16")}')
    cache.mkdir()
    mark_of(TARGET, "bfloat16").touch()

    assert compiling.compile_ahead(TARGET, ["bfloat16"], never)
    assert not (tmp_path / "arguments").exists()
    assert compiling.compile_ahead(TARGET, ["bfloat16", "float16"], never)
    assert (tmp_path / "arguments").read_text().split()[-1] == "float16"


def test_a_mark_is_of_one_dtype_one_architecture_and_one_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = mark_of(TARGET, "bfloat16")
    others = {mark_of(TARGET, "float16"), mark_of("cuda:80:32", "bfloat16")}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor"))
    others.add(mark_of(TARGET, "bfloat16"))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".triton" / "cache"
    assert here not in others
    assert len(others) == 3


@pytest.mark.parametrize("end", ["not wanted", "late"])
def test_a_process_that_goes_on_is_killed(
    python: MakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    python("echo $$ > starting; mv starting pid; exec sleep 100")
    pid = tmp_path / "pid"
    if end == "late":
        begin = iter([0.0])  # the process may be there before the wait for it begins
        clock = SimpleNamespace(monotonic=lambda: next(begin, 1e9 * pid.exists()), sleep=time.sleep)
        monkeypatch.setattr(compiling, "time", clock)
        with pytest.raises(TimeoutError, match="took longer than"):
            compiling.compile_ahead(TARGET, ["bfloat16"], never)
    else:
        assert not compiling.compile_ahead(TARGET, ["bfloat16"], pid.exists)
    assert not is_running(int(pid.read_text()))


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$"])
def test_a_process_that_fails_leaves_the_device_with_torchs_operations_and_is_told_once(
    python: MakePython, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str
) -> None:
    python(script)
    monkeypatch.setattr(prepared, "_tables", {})
    monkeypatch.setattr(prepared, "installed", lambda: True)
    monkeypatch.setattr(prepared, "target_of", lambda device: TARGET)
    loaded: list[torch.device] = []
    monkeypatch.setattr(prepared, "_load", loaded.append)

    prepare(torch.device("cuda", 0))

    assert loaded == []
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "continue with torch's own operations" in line
    assert ("its compilation ended with code 3" if script == "exit 3" else "code -9") in line


def test_what_lies_in_another_cache_when_it_may_be_loaded_is_compiled_there(
    python: MakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor sets a cache of its own when it compiles the job's first graph."""
    name = mark_of(TARGET, "bfloat16").name
    python(f"mkdir -p $TRITON_CACHE_DIR; touch $TRITON_CACHE_DIR/{name}; echo $TRITON_CACHE_DIR >> caches")
    ran: list[int] = []

    def may_load() -> bool:
        ran.append(len((tmp_path / "caches").read_text().split()))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor"))
        return True

    monkeypatch.setattr(prepared, "installed", lambda: True)
    monkeypatch.setattr(prepared, "target_of", lambda device: TARGET)
    monkeypatch.setattr(prepared, "_trial_stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(prepared, "_load", lambda device: ran.append(0))
    prepare(torch.device("cuda", 0), dtypes=[torch.bfloat16], may_load=may_load)

    assert (tmp_path / "caches").read_text().split() == [str(tmp_path / "cache"), str(tmp_path / "inductor")]
    assert ran == [1, 2, 2, 0]  # asked again behind the second process, and just before it is loaded


def test_no_interpreter_to_start_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")  # as in a program that embeds Python
    monkeypatch.setattr(prepared, "installed", lambda: True)
    monkeypatch.setattr(prepared, "target_of", lambda device: TARGET)

    prepare(torch.device("cuda", 0))

    assert "continue with torch's own operations" in caplog.text


CHILD = """
import os, signal, sys
from capd_client.rowkernel import compile
compile.compile_kernels = lambda *asked: print(asked)
compile.main(["--target", "cuda:90:32", "--dtypes", "bfloat16,float32"])
print(os.nice(0), 0 < signal.alarm(0) <= compile.LIMIT_S, "torch" in sys.modules)
"""


def test_the_process_is_of_the_lowest_priority_and_ends_itself(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.splitlines() == ["('cuda:90:32', ['bfloat16', 'float32'])", "19 True False"]
    assert [path.name for path in cache.iterdir()] == ["capd-rows.lock"]


# What a launch with real tensors compiles, in the place of the driver that would load it.
LAUNCH = """
import os, sys, torch, triton
from triton.backends.compiler import GPUTarget
from capd_client.rowkernel import kernels
from capd_client.rowkernel.compile import _Driver
triton.runtime.driver.set_active(_Driver(GPUTarget("cuda", int(sys.argv[1]), 32)))
numbers, parts = torch.zeros(2560, dtype=torch.int64), torch.zeros(300_000, dtype=torch.float64)
merged = {**kernels.merge_constants(), **kernels.OPTIONS}
kernels.merged_rows.warmup(numbers, parts, 77, grid=(9, 77), **merged)
for dtype in sys.argv[2:]:
    constants = {**kernels.partial_constants(dtype), **kernels.OPTIONS}
    values = torch.empty((256, constants["WIDTH"])) if constants["WIDTH"] else torch.empty((0, 0))
    made = kernels.partial_rows.warmup(numbers, values, parts, 77, grid=(99,), **constants)
    assert "ld.global.v" in made.asm["ptx"], "whole blocks are read word by word"
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (1 GB) is not installed")
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_a_launch_finds_what_the_process_has_compiled(cache: Path, architecture: str) -> None:
    dtypes = ["float4_e2m1fn_x2", "bfloat16", "float32", "float16", "float8_e4m3fn", "float8_e5m2"]
    target = f"cuda:{architecture}:32"

    assert compiling.compile_ahead(target, dtypes, never)

    assert all(mark_of(target, dtype).exists() for dtype in dtypes)
    entries = sorted(cache.iterdir())
    subprocess.run(
        [sys.executable, "-c", LAUNCH, architecture, *dtypes],
        check=True,
        timeout=100,
        cwd=Path(__file__).parents[4],
    )
    assert sorted(cache.iterdir()) == entries
