"""What the GPU tests share: a daemon, and a job in a process of its own that captures to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import capd
from capd.store.reader import Store
from tests.integration.processes import Daemon

PREAMBLE = """
import threading, time
import torch
import capd_client
from capd_client.api import session

def capture(tensor, name, iteration=0, **more):
    capd_client.capture(tensor, tensor_name=name, iteration=iteration, **more)

def ready(index=0):
    # until ring, page lock and the statistics' kernel are there, or cannot be had
    session().prepare([torch.device("cuda", index)])
    for thread in threading.enumerate():
        if thread.name == "capd-compile":
            thread.join(60)
    locked_by = time.monotonic() + 60
    while not session().devices.pinned and time.monotonic() < locked_by:
        if not any(thread.name == "capd-pin" for thread in threading.enumerate()):
            break
        time.sleep(0.01)

def drained(timeout_s=60):
    assert capd_client.flush(timeout_s), capd_client.counters()
    return capd_client.counters()
"""


def python_path() -> str:
    """The sources of this tree, before whatever the interpreter was given: it need not have capd installed."""
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs a GPU; those marked gpus(2) need as many."""
    missing = pytest.mark.skip(reason="needs a CUDA device")
    few = pytest.mark.skip(reason="needs two CUDA devices")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)
        elif "two_gpus" in item.fixturenames and torch.cuda.device_count() < 2:
            item.add_marker(few)


@pytest.fixture
def two_gpus() -> None:
    """For tests that need two devices: skipped where there are fewer."""


@dataclass
class Captured:
    """What came of a job: its output, and its tensors by (name, iteration)."""

    output: str
    tensors: dict[tuple[str, int], torch.Tensor]


@dataclass
class Job:
    """Runs code as a rank. `settings` are CAPD_ variables, without the prefix."""

    daemon: Daemon
    directory: Path
    preamble: str = PREAMBLE

    def start(self, code: str, **settings: str) -> subprocess.Popen[str]:
        """Start it, with `capture(tensor, name, iteration)`, `ready()` and `drained()` at hand."""
        environment = {
            **os.environ,
            "CAPD_ENDPOINT": self.daemon.endpoint,
            "CAPD_RUN_ID": "run",
            "CAPD_POLICY": "block",
            "CAPD_ARENA_BYTES": str(1 << 30),
            "PYTHONPATH": python_path(),
            "TORCH_SHOW_CPP_STACKTRACES": "0",
            **{f"CAPD_{name.upper()}": value for name, value in settings.items()},
        }
        return subprocess.Popen(
            [sys.executable, "-c", self.preamble + code],
            env=environment,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, code: str, **settings: str) -> Captured:
        """Run it to its end, which must be a good one, and read back what was stored."""
        process = self.start(code, **settings)
        try:
            output, _ = process.communicate(timeout=110)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, output
        return Captured(output, self.stored())

    def stored(self) -> dict[tuple[str, int], torch.Tensor]:
        """Stop the daemon and read every tensor."""
        self.daemon.stop()
        return {
            (series.key.tensor_name, record.iteration): series.torch(index)
            for series in self.store().series
            for index, record in enumerate(series.records)
            if series.kept == "tensor"
        }

    def store(self) -> Store:
        """What was stored; after `run` or `stored`."""
        return capd.open(self.directory / "store" / "run.zarr")


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    """A daemon with a store of its own, and what runs against it."""
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    yield Job(daemon, tmp_path)
    daemon.discard()


@pytest.fixture
def same() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Whether two tensors have the same bits."""

    def compare(one: torch.Tensor, other: torch.Tensor) -> bool:
        return (
            one.dtype is other.dtype
            and one.shape == other.shape
            and torch.equal(
                one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
            )
        )

    return compare
