"""A script that knows nothing of capd, started by itself with two variables, captures what `capd run` would."""

from __future__ import annotations

import sys
from pathlib import Path

import capd
from tests.kit import forking, processes
from tests.kit.daemon import DaemonProcess
from tests.kit.jobs.installed import Installed

SCRIPT = """
import subprocess, sys
import torch
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
subprocess.run([sys.executable, "-c", "pass"], check=True)
for _ in range(3):
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def captured(run: Path) -> dict[str, list[bytes]]:
    store = capd.open(run)
    return {series.path: [record.numpy().tobytes() for record in series] for series in store}


def test_a_script_by_itself_is_captured_as_under_capd_run(runtime_dir: Path) -> None:
    script = runtime_dir / "train.py"
    script.write_text(SCRIPT)
    installed = Installed(runtime_dir / "venv")
    installed.install_requirements()
    daemon = DaemonProcess(runtime_dir / "store", runtime_dir / "capd.sock")
    endpoint = f"unix:{daemon.path}"
    assert f"`CAPD_ENDPOINT={endpoint} CAPD_WATCH=1 python train.py`" in daemon.text()

    processes.capd(
        "run",
        "--run-id",
        "told",
        "--",
        sys.executable,
        str(script),
        inner=forking.TRAINING,
        CAPD_ENDPOINT=endpoint,
    )
    done = installed.run(
        script, CAPD_ENDPOINT=endpoint, CAPD_WATCH="1", CAPD_RUN_ID="alone", OMP_NUM_THREADS="1"
    )
    unwatched = installed.run(script, CAPD_ENDPOINT=endpoint, CAPD_RUN_ID="none", OMP_NUM_THREADS="1")
    daemon.stop()

    assert (done.returncode, done.stderr) == (0, "")
    assert (unwatched.returncode, unwatched.stderr) == (0, "")
    alone = captured(daemon.store / "alone.zarr")
    assert alone == captured(daemon.store / "told.zarr")
    assert len(alone) == 8
    assert not (daemon.store / "none.zarr").exists()
