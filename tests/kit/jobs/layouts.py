"""Runs the tiny GPT of `tests.kit.models.megatron_layouts` in a layout, captured, each into a run of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.kit import forking
from tests.kit.models.megatron_layouts import Layout
from tests.kit.paths import REPOSITORY

__all__ = ["Layout", "run_layout"]


def run_layout(layout: Layout, directory: Path, name: str = "job", **settings: str) -> Path:
    """Train in a layout below `capd run`; returns the store. settings: environment."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CAPD_")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "CAPD_POLICY": "block", "CAPD_STRICT": "1", "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo", **settings}  # fmt: skip
    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(directory), "--run-id", name, "--",
         sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.ranks),
         "-m", "tests.kit.models.megatron_layouts", layout.json()],
        env=environment, capture_output=True, text=True, timeout=300, inner=forking.TRAINING,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / f"{name}.zarr"
