"""Ranks that start a daemon for themselves, told what to do line by line, and what they leave in their store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import capd
from tests.kit import forking
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Told

__all__ = ["Job", "StartJob", "only_run", "samples", "spooled"]

JOB = """
import json, os, sys, torch
from capd_client.tensor_saver import save_tensor
import capd_client
def save(first, last):
    return [save_tensor(torch.full((64,), float(n)), "linear", "forward", "bf16", "x", sample_idx=n) is not None
            for n in range(first, last)]
def children(task):
    try:
        with open(f"/proc/self/task/{task}/children") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
        return ""
for line in sys.stdin:
    verb, *numbers = line.split()
    numbers = [int(n) for n in numbers]
    if verb == "save":
        print(json.dumps(all(save(*numbers))), flush=True)
    elif verb == "flush":
        print(json.dumps(capd_client.flush(30)), flush=True)
    elif verb == "own":
        from capd_client.tensor_saver import TensorSaver
        saver = TensorSaver("mine/mxfp8")
        print(json.dumps(saver.save_tensor(torch.ones(2), "linear", "forward", "mxfp8", "x") is not None), flush=True)
    elif verb == "children":
        print(json.dumps([children(task) for task in os.listdir("/proc/self/task")]), flush=True)
    elif verb == "leave":
        break
"""


class Job(Told):
    """A rank, below the command `prefix`, that does what it is told."""

    def __init__(self, directory: Path, *prefix: str, **environment: str) -> None:
        self.process = forking.popen(
            [*prefix, sys.executable, "-c", JOB], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CAPD_ARENA_BYTES": str(1 << 20),
                 "TENSOR_SAVE_ENABLED": "true", **environment},
        )  # fmt: skip

    def leave(self) -> str:
        """Returns what it said."""
        _, said = self.process.communicate("leave\n", timeout=60)
        assert self.process.returncode == 0, said
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


StartJob = Callable[..., Job]


def samples(run: Path) -> list[tuple[int, int | None]]:
    return sorted((s.key.rank, record.sample_idx) for s in capd.open(run).series for record in s.records)


def only_run(store: Path) -> Path:
    (run,) = store.glob("*.zarr")
    return run


def spooled(run: Path) -> list[Path]:
    return [path for path in run.glob(".capd/node=*/spool/*") if path.is_file()]
