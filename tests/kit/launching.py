"""Jobs of several ranks below `capd run` and torchrun, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.paths import REPOSITORY

TORCH_ABORT = "terminate called without an active exception"
"""What a C++ program prints whose thread outlives its owner. capd starts no such thread, torch's gloo does."""


def directories_of(package: str) -> str:
    """Where a package lies that capd's development does not need: directories, separated by colons; may be none.

    CAPD_TEST_<PACKAGE> names them: of `pip install --target`, what the package needs among them.
    """
    return os.environ.get(f"CAPD_TEST_{package.upper()}", "")


def needs(package: str) -> pytest.MarkDecorator:
    """Skips the tests where such a package is neither installed nor named."""
    here = bool(directories_of(package)) or find_spec(package) is not None
    reason = f"{package} is not installed, and CAPD_TEST_{package.upper()} does not say where it lies"
    return pytest.mark.skipif(not here, reason=reason)


def run_ranks(
    job: Path, ranks: int, directory: Path, *arguments: str, package: str = "", **settings: str
) -> Path:
    """Run the script `job` on `ranks` ranks; returns the store of what it captured.

    The script is given a file name that no one else has, and `arguments`. package: see `directories_of`. settings:
    environment.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), package and directories_of(package)]))
    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(directory), "--run-id", "job", "--policy", "block", "--",
         sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(job), str(directory / "told"), *arguments],
        env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **settings},
        capture_output=True, text=True, timeout=380, inner=forking.TRAINING,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "job.zarr"


def assert_trained(done: subprocess.CompletedProcess[str]) -> None:
    """Fail unless a job without capd has done its work.

    A rank that torch itself aborts after its last line has done it: that is no failure of capd. Whoever reads what the
    job wrote finds out whether it is whole.
    """
    assert done.returncode == 0 or TORCH_ABORT in done.stderr, done.stdout + done.stderr


def can_unshare(*options: str) -> bool:
    """Whether this machine lets us make such namespaces."""
    return subprocess.run(["unshare", *options, "true"], capture_output=True, check=False).returncode == 0
