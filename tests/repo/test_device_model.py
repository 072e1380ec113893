"""The model of a GPU in which capd's device path runs: the goals are kept there, and a worse path is seen in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.paths import REPOSITORY

MODEL = REPOSITORY / "benchmarks/model/device_model.py"

ONE = """
from capd_client.device import transfers
RAW = True
CHANGE
from benchmarks.model.model_runs import MIB, Scene, run
from benchmarks.model.modelled_gpu import Constants, Rounds
scene, late = Scene(256, 16 * MIB, 100.0, steps=1, lead_us=1.0), Rounds(2000.0, 0.05)
found = run(scene, Constants(python_us=15.0), late, raw=RAW)
print(found.link_busy, found.host_us)
"""


def one(change: str) -> tuple[float, float]:
    """How busy the link is, and µs of the host for a capture, after a change of the code."""
    done = subprocess.run(
        [sys.executable, "-c", ONE.replace("CHANGE", change)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    link_busy, host_us = map(float, done.stdout.split())
    return link_busy, host_us


@pytest.mark.slow
def test_its_goals_are_kept_where_the_host_is_not_the_limit(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(MODEL),
            "--quick",
            "--json",
            str(tmp_path / "found.json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "step with copies" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    checks = {check["what"]: check["met"] for check in found["checks"]}
    assert checks["step with copies"]
    assert checks["step with tensors held"]
    assert checks["link busy, late pump"]


@pytest.mark.slow
def test_a_worse_path_leaves_the_link_idle() -> None:
    """Where training threads issue nothing, and where less may be under way then."""
    by_the_pump, _ = one("RAW = False")
    with_less_ahead, _ = one("RAW = False; transfers.AHEAD_NBYTES = 1 << 20")
    assert one("")[0] >= 0.95
    assert with_less_ahead + 0.05 < by_the_pump < 0.9


@pytest.mark.slow
def test_what_training_threads_issue_is_their_time() -> None:
    assert one("")[1] > one("transfers.ISSUE_NBYTES = 1 << 40")[1]
