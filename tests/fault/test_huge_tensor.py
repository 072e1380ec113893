"""A tensor above 2 GiB makes the whole way, where the arena holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capd
from tests.kit.processes import Daemon

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

NBYTES = 2_300_000_000
JOB = f"""
import torch, capd_client
x = torch.zeros({NBYTES}, dtype=torch.uint8)
x[::1_000_003] = 7
x[-1] = 9
capd_client.capture(x, tensor_name="huge")
assert capd_client.flush(300), capd_client.counters()
"""


def test_a_tensor_above_two_gibibytes_comes_back(daemon: Daemon, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CAPD_ENDPOINT": daemon.endpoint,
        "CAPD_RUN_ID": "run",
        "CAPD_ARENA_BYTES": str(NBYTES + (64 << 20)),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    subprocess.run([sys.executable, "-c", JOB], env=environment, check=True, timeout=400)
    peak = daemon.anonymous_nbytes()
    daemon.stop()

    [series] = capd.open(tmp_path / "store" / "run.zarr").series
    held = series.torch(0)
    marks = torch.nonzero(held).flatten()
    assert held.shape == (NBYTES,)
    assert marks.tolist() == [*range(0, NBYTES, 1_000_003), NBYTES - 1]
    assert held[-1] == 9
    assert series.records[0].stats.zero == NBYTES - len(marks)
    assert peak < 512 << 20  # chunk by chunk: the record is never whole in the daemon's own memory
