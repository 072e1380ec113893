"""The benchmark of GPU captures runs from end to end, here on the CPU, and says so where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.paths import REPOSITORY

BENCHMARK = REPOSITORY / "benchmarks/gpu/gpu_capture.py"
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forking.run(
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
    assert "no GPU" in found["device"]
    for section in ("memory", "small"):
        assert found[section]["dropped"] == {}
    for calls in found["calls"].values():
        assert calls["dropped"] == {}
        assert {"room", "names"} <= calls["parts"].keys()
    for step in found["step"].values():
        assert step["captured"] == step["expected"]
    assert {row["dropped"] for row in found["host-bound"]} == {0}
    beside = [(row["beside"], row["piece"], row["ahead"]) for row in found["interference"]]
    assert len(set(beside)) == len(beside) == 12
    assert {row["way"] for row in found["rows"]} == {
        "fill_row, without Triton", "16 such tensors at once", "torch's operations"
    }  # fmt: skip
    assert {name.rpartition("_")[2] for name in found["constants"]} == {"us", "gbps"}
    tables = [line for line in done.stdout.splitlines() if line.startswith("|---")]
    assert len(tables) == 10
    assert {check["verdict"] for check in found["checks"]} <= {"MISSED", "met", "stretch met"}
    assert {check["what"]: check["verdict"] for check in found["checks"]}["drops of block"] == "met"


@pytest.mark.parametrize(
    ("value", "verdict"), [(40.1, "MISSED"), (40.0, "met"), (28.1, "met"), (28.0, "stretch met")]
)
def test_a_figure_is_judged_by_both_of_its_bounds(value: float, verdict: str) -> None:
    script = (
        f"from benchmarks.gpu import gpu_tables; print(gpu_tables.Check('x', {value}, 40.0, 28.0).verdict,"
        f" gpu_tables.Check('x', -{value}, -40.0, -28.0, at_most=False).verdict)"
    )
    done = forking.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**NO_GPU, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout.split() == [*verdict.split(), *verdict.split()]
