"""Jobs of several ranks below `capd run` and torchrun, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_ranks(job: str, ranks: int, directory: Path) -> Path:
    """Run a script of this directory on `ranks` ranks; returns the store of what it captured."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    done = subprocess.run(
        [sys.executable, "-m", "capd", "run", "--store", str(directory), "--run-id", "job", "--policy", "block", "--",
         sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(Path(__file__).with_name(job)), str(directory / "told")],
        env={**environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "job.zarr"
