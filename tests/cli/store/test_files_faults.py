"""`capd export` and `capd import` where something goes wrong on the way: kills, a full disk, tensors that grow."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, linear_key
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary

Capd = Callable[..., Result]
MIB = 1 << 20
KILLS = 8

# `capd` as its own process would run it, where no file may grow beyond a limit: what a full disk is like.
LIMITED = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from capd.cli.app import main
main(sys.argv[2:])
"""

# … and tells the most memory that it ever had.
MEASURED = """
import sys
from capd.cli.app import main
try:
    main(sys.argv[1:])
finally:
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(line.split()[1]) << 10)
"""

# Per line how many seconds an import may live, and into which store it goes; forked, because the start of a process
# takes longer than the import.
MORTAL = """
import os, signal, sys, time
import torch, zarr
import capd.cli.app, capd.pt_files.import_, capd.server.daemon
for line in sys.stdin:
    seconds, store = line.split()
    deadline = time.monotonic() + float(seconds)
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr
        capd.cli.app.main(["import", sys.argv[1], "--store", store])
    ended = 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.001)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def save(path: Path, tensor: torch.Tensor, **metadata: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(seed_dictionary(tensor, **metadata), path)


def numbered(logs: Path, number: int, name: str = "input") -> Path:
    return logs / "mxfp8" / SEED_NAME.replace("0001", f"{number:04d}").replace("input", name)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A run of four small records, then a large one."""
    writer = StoreWriter(tmp_path / "root")
    for second in range(4):
        bits = np.full((8, 8), second, np.float32)
        writer.put("run", linear_key(), bits, "float32", Moment(iteration=second, time_ns=second * 10**9))
    large = np.random.default_rng(1).normal(size=(1024, 1024)).astype(np.float32)
    writer.put("run", linear_key(tensor_name="large"), large, "float32", Moment(time_ns=9 * 10**9))
    return writer.close() / "run.zarr"


@pytest.mark.parametrize("to", ["pt", "npz", "safetensors"])
def test_a_full_disk_stops_an_export_and_what_stands_is_whole(mixed: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"

    done = python(LIMITED, MIB, "export", mixed, "--to", to, "--out", out)

    assert done.returncode == 6, done.stderr
    assert "Make room and export again" in done.stderr
    left = [path for path in out.rglob("*") if path.is_file()]
    assert len(left) == (4 if to == "pt" else 1)  # the small records: a file each, or one for their series
    assert {path.suffix for path in left} == {f".{to}"}
    if to == "pt":
        found = [torch.load(path, weights_only=True)["tensor"] for path in sorted(left)]
        assert [float(tensor[0, 0]) for tensor in found] == [0, 1, 2, 3]


def test_a_disk_that_fills_up_stops_an_import_which_then_goes_on(capd: Capd, tmp_path: Path) -> None:
    logs, store = tmp_path / "logs", tmp_path / "store"
    tensors = [torch.randn(512, 512) for _ in range(8)]
    for number, tensor in enumerate(tensors):
        save(numbered(logs, number), tensor)

    stopped = python(LIMITED, 4 * MIB, "import", logs, "--store", store)
    done = capd("import", logs, "--store", store, "--json")

    assert stopped.returncode == 6, stopped.stderr
    assert "give the import again" in stopped.stderr
    assert 0 < done.json["already"] < 8
    [series] = open_store(store / "logs.zarr").series
    assert all(torch.equal(series.torch(place), tensor) for place, tensor in enumerate(tensors))
    assert len(series) == 8
    assert capd("verify", store / "logs.zarr").code == 0


def test_a_foreign_directory_with_the_name_of_a_temporary_file_is_left_alone(
    capd: Capd, mixed: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / ".capd-export-mine").mkdir(parents=True)
    (tmp_path / "out" / ".capd-export-link").symlink_to(tmp_path)
    (tmp_path / "out" / ".capd-export-left").write_bytes(b"by an export that was killed")

    assert capd("export", mixed, "--out", tmp_path / "out").code == 0

    assert sorted(os.listdir(tmp_path / "out")) == [".capd-export-mine", "bf16"]


@pytest.mark.fault
def test_views_that_grow_64_times_take_no_more_memory_than_their_files(capd: Capd, tmp_path: Path) -> None:
    logs, one = tmp_path / "logs", tmp_path / "one"
    views = [torch.full((1, 64 << 10), float(number)).expand(64, -1) for number in range(24)]  # 16 MiB each
    save(numbered(one, 0), views[0])
    for number, view in enumerate(views):
        save(numbered(logs, number), view)

    of_one, of_all = (
        int(
            python(MEASURED, "import", place, "--store", tmp_path / "store", "--jobs", "2").stdout.split()[-1]
        )
        for place in (one, logs)
    )

    assert of_all - of_one < 128 * MIB  # 384 MiB of tensors
    [series] = open_store(tmp_path / "store" / "logs.zarr").series
    assert [float(series.torch(place)[63, -1]) for place in range(24)] == list(range(24))


@pytest.mark.slow
def test_an_import_killed_at_any_moment_loses_nothing_and_doubles_nothing(capd: Capd, tmp_path: Path) -> None:
    logs, run = tmp_path / "logs", tmp_path / "store" / "logs.zarr"
    expected: dict[str, list[torch.Tensor]] = {"input": [], "output": [], "weight": []}
    for number in range(150):
        name = "weight" if number % 10 == 0 else ("input", "output")[number % 2]
        expected[name].append(torch.randn(300, 512) if name == "weight" else torch.randn(32, 32))
        save(numbered(logs, number, name), expected[name][-1], tensor_name=name)
    seed = random.randrange(1 << 32)
    print(f"{seed = }")  # shown where the test fails
    chance = random.Random(seed)

    with imports_that_die(logs) as lives_for:
        assert lives_for(60.0, tmp_path / "first") == 0  # when everything is imported
        began = time.monotonic()
        assert lives_for(60.0, tmp_path / "whole") == 0
        takes_s = time.monotonic() - began
        ends = []
        for _ in range(KILLS):
            ends.append(lives_for(chance.uniform(0, 0.3 * takes_s), tmp_path / "store"))
            assert not (run / "zarr.json").exists() or capd("verify", run).code == 0

    assert -signal.SIGKILL in ends
    assert capd("import", logs, "--store", tmp_path / "store").code == 0
    found = {series.key.tensor_name: series for series in open_store(run).series}
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        assert len(found[name]) == len(tensors)
        assert all(torch.equal(found[name].torch(place), tensor) for place, tensor in enumerate(tensors))
    assert capd("verify", run).code == 0


@contextlib.contextmanager
def imports_that_die(logs: Path) -> Iterator[Callable[[float, Path], int]]:
    """`lives_for(seconds, store)` imports `logs`, with SIGKILL after so long; returns how it ended."""
    command = [sys.executable, "-c", MORTAL, str(logs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        lines, answers = process.stdin, process.stdout
        assert lines is not None
        assert answers is not None

        def lives_for(seconds: float, store: Path) -> int:
            print(seconds, store, file=lines, flush=True)
            return int(answers.readline())

        yield lives_for
        lines.close()
