"""Runs a module of the tests below `capd run`, captured into a run of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.kit import forking
from tests.kit.paths import REPOSITORY

__all__ = ["run_captured"]

SETTINGS = {
    "CAPD_POLICY": "block", "CAPD_STRICT": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def run_captured(
    directory: Path, name: str, module: str, *arguments: str, ranks: int | None = None, **settings: str
) -> Path:
    """Run a module; returns the store.

    ranks: Those that torchrun starts; without them the module runs by itself. settings: environment, added to
    `SETTINGS`.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CAPD_")}
    path = [str(REPOSITORY), settings.pop("PYTHONPATH", ""), environment.get("PYTHONPATH", "")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(directory), "--run-id", name, "--",
         sys.executable, *(torchrun if ranks else []), "-m", module, *arguments],
        env={**environment, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, path)), **settings},
        capture_output=True, text=True, timeout=300, inner=forking.TRAINING,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / f"{name}.zarr"
