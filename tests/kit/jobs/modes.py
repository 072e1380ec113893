"""Runs of `modes_job.py`, with and without capture."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.kit import forking
from tests.kit.processes import Daemon

JOB = Path(__file__).with_name("modes_job.py")
ITERATIONS, MICRO_BATCHES = 5, 2


def train(out: Path, at_pause: Callable[[str], None] = lambda _: None, **environment: str) -> dict[str, Any]:
    """Run the job; what it held and counted. at_pause: told the line of each pause, which then ends."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    path = os.pathsep.join([str(JOB.parents[3]), os.environ.get("PYTHONPATH", "")])
    with forking.popen(
        [sys.executable, str(JOB), str(out), str(ITERATIONS), str(MICRO_BATCHES)],
        imports=forking.TRAINING,
        env={**inherited, "PYTHONPATH": path, "CAPD_STRICT": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            at_pause(line.strip())
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    held: dict[str, Any] = torch.load(out, weights_only=True)
    return held


def job(
    daemon: Daemon, out: Path, at_pause: Callable[[str], None] = lambda _: None, **environment: str
) -> dict[str, Any]:
    """Run the job with capture."""
    settings = {"CAPD_RUN_ID": "run", "CAPD_POLICY": "block", "CAPD_ARENA_BYTES": str(8 << 20)}
    return train(out, at_pause, CAPD_ENDPOINT=daemon.endpoint, **{**settings, **environment})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.contiguous().view(torch.int32))
