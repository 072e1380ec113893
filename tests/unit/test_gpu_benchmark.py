"""The benchmark of GPU captures runs from end to end, here on the CPU, and says so where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_capture.py"
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARK, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=NO_GPU,
    )


def test_without_a_gpu_it_measures_nothing_and_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA device was found" in done.stderr


@pytest.mark.fault
@pytest.mark.timeout(420)
def test_every_section_runs_and_reports(tmp_path: Path, runtime_dir: Path) -> None:
    scratch, json_file = (
        runtime_dir / "scratch",
        tmp_path / "report.json",
    )  # the daemon's socket needs a short path
    scratch.mkdir()
    done = run("--quick", "--rounds", "1", "--directory", scratch, "--json", json_file)
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []

    found = json.loads(json_file.read_text())
    assert found["checks"]
    assert "no GPU" in found["calls"]["device"]
    for section in ("calls", "memory", "small"):
        assert found[section]["dropped"] == {}
    for step in found["step"].values():
        assert step["captured"] == step["expected"]
    assert [row["beside"] for row in found["interference"]] == ["nothing", "captures", "unbounded captures"]
    assert {row["way"] for row in found["rows"]} == {"fill_row, without Triton", "torch's operations"}
    tables = [line for line in done.stdout.splitlines() if line.startswith("|---")]
    assert len(tables) == 6
