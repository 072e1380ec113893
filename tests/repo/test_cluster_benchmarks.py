"""The benchmarks of clusters run from end to end at tiny sizes, and report every row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Each starts Dask several times.
pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "cluster"
TIMEOUT_S = 300


def results(script: str, directory: Path) -> dict[str, Any]:
    report = directory / "report.json"
    command = [sys.executable, BENCHMARKS / script, "--quick", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--directory", directory, "--json", report],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == [report]
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["checks"]
    return found


def test_workers_and_one_process_find_the_same(tmp_path: Path) -> None:
    rows = results("workers.py", tmp_path)["rows"]

    assert [row["variant"] for row in rows][:3] == ["1 process", "1 worker", "2 workers"]
    assert len({row["sqnr_db"] for row in rows}) == 1
    assert all(row["workers_cpu_s"] > 0 for row in rows)


def test_more_workers_are_predicted_to_take_less_time(tmp_path: Path) -> None:
    found = results("cluster_model.py", tmp_path)

    assert [one["workers"] for one in found["compared"]] == [1, 2]
    for curve in found["curves"].values():
        hours = [one["hours"] for one in curve]
        assert hours == sorted(hours, reverse=True)
        assert curve[0]["speedup"] == 1
