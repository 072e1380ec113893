"""A job in a process of its own that captures to a daemon, for the GPU tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import capd
from capd.store.read.store import Store
from tests.kit.processes import Daemon

PREAMBLE = """
import sys, threading, time
import torch
import capd_client
from capd_client.api import session
from capd_client.arena.arena import STEP_NBYTES

KIND = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: of the stand-in, for what asks for a device's name
HELD = {}

# What calls may take together that must not wait for the device. The stand-in copies at once, with the host's cores.
SOON_S = 0.05 if KIND == "cuda" else 1.0

def hold(tensor, *key):
    # a copy that capd knows nothing of: what is captured under this key is compared with it
    assert key not in HELD, key
    HELD[key] = tensor.detach().clone()

def save(name="held.pt"):
    torch.cuda.synchronize()
    torch.save({key: tensor.cpu() for key, tensor in HELD.items()}, name)

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

def grown(nbytes):
    # until so much of the arena is there and locked, as if it had been in use: the client thread makes it
    arena, by = session().arena, time.monotonic() + 60
    arena.target = max(arena.target, min(arena.nbytes, arena.start + -(-nbytes // STEP_NBYTES) * STEP_NBYTES))
    while arena.populated < arena.target and time.monotonic() < by:
        time.sleep(0.01)
    ready()
    assert session().devices.pinned

def capacity():
    # the largest tensor that the ring holds, in bytes
    return session().devices.stager(torch.device("cuda", 0)).capacity

def drained(timeout_s=60):
    assert capd_client.flush(timeout_s), capd_client.counters()
    return capd_client.counters()
"""


def python_path() -> str:
    """The sources of this tree, before whatever the interpreter was given: it need not have capd installed."""
    return os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])


@dataclass
class Captured:
    """What came of a job: its output, its tensors by (name, iteration), and what it saved to compare them with."""

    output: str
    tensors: dict[tuple[str, int], torch.Tensor]
    held: dict[Any, torch.Tensor]

    def assert_as_held(self) -> None:
        """Every tensor that was captured was held, and the other way round, and each has the same bits."""
        assert self.held
        assert self.tensors.keys() == self.held.keys()
        for key, tensor in self.held.items():
            assert same_bits(self.tensors[key], tensor), key


@dataclass
class Job:
    """Runs code as a rank. `settings` are CAPD_ variables, without the prefix."""

    daemon: Daemon
    directory: Path
    preamble: str = PREAMBLE
    environment: dict[str, str] = field(default_factory=dict)
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen

    def start(self, code: str, **settings: str) -> subprocess.Popen[str]:
        """Start it, with what PREAMBLE defines at hand."""
        environment = {
            **os.environ,
            "CAPD_ENDPOINT": self.daemon.endpoint,
            "CAPD_RUN_ID": "run",
            "CAPD_POLICY": "block",
            "CAPD_ARENA_BYTES": str(1 << 30),
            "PYTHONPATH": python_path(),
            "TORCH_SHOW_CPP_STACKTRACES": "0",
            **self.environment,
            **{f"CAPD_{name.upper()}": value for name, value in settings.items()},
        }
        return self.popen(
            [sys.executable, "-c", self.preamble + code],
            env=environment,
            cwd=self.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, code: str, **settings: str) -> Captured:
        """Run it to its end, which must be a good one, and read back what was stored."""
        output = self.end(self.start(code, **settings))
        return Captured(output, self.stored(), self.held())

    def end(self, process: subprocess.Popen[str]) -> str:
        """Wait for the end of what `start` began, which must be a good one; returns what it printed."""
        try:
            output, _ = process.communicate(timeout=110)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, output
        return output

    def held(self, name: str = "held.pt") -> dict[Any, torch.Tensor]:
        """What the job's `save` wrote, where it did."""
        path = self.directory / name
        return torch.load(path, weights_only=True) if path.exists() else {}

    def stored(self) -> dict[tuple[str, int], torch.Tensor]:
        """Stop the daemon and read every tensor."""
        self.daemon.stop()
        return {
            (series.key.tensor_name, record.iteration): series.torch(index)
            for series in self.store().series
            for index, record in enumerate(series.records)
            if series.kept == "tensor"
        }

    def by_module(self) -> dict[tuple[str, str, int], torch.Tensor]:
        """Every tensor by (module, name, iteration), each of which may be there once; after `run` or `stored`."""
        found: dict[tuple[str, str, int], torch.Tensor] = {}
        for series in self.store().series:
            if series.kept != "tensor":
                continue
            for index, record in enumerate(series.records):
                key = (series.key.module, series.key.tensor_name, record.iteration)
                assert key not in found, key
                found[key] = series.torch(index)
        return found

    def store(self) -> Store:
        """What was stored; after `run` or `stored`."""
        return capd.open(self.directory / "store" / "run.zarr")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
        )
    )
