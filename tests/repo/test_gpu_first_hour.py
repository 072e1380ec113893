"""The first hour with a GPU, here on the CPU: it goes on where it ended, stops where it must, and writes its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import forking
from tests.kit.paths import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks/gpu/gpu_first_hour.py"
MACHINE = f"none, torch {torch.__version__}, quick"
STEPS = 17


def run(*arguments: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """The script; `code` runs in its interpreter before it."""
    script = f"import runpy, sys\n{code}\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return forking.run(
        [sys.executable, "-c", script, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
    )


def keep(
    state: Path, step: str, checks: list[dict[str, Any]], machine: str = MACHINE, problem: str = ""
) -> None:
    """What a step of an earlier start has left."""
    state.mkdir(exist_ok=True)
    result = {
        "step": step, "machine": machine, "seconds": 1.0, "shown": "it was measured before\n", "problem": problem,
        "found": {} if problem else {"checks": checks, "failed": {}},
    }  # fmt: skip
    (state / f"{step}.json").write_text(json.dumps(result))


def check(what: str, value: float, must: float, verdict: str) -> dict[str, Any]:
    return {"what": what, "value": value, "must": must, "stretch": None, "at_most": True, "verdict": verdict}


def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    done = run("--state", tmp_path / "state")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no CUDA device was found: nothing was measured\n"
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_second_start_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = run("--quick", "--state", state, "--only", "fact-machine", "fact-border")
    assert first.returncode == 0, first.stderr
    kept = (state / "fact-border.json").read_text()

    second = run("--quick", "--state", state, "--only", "fact-machine", "fact-border", "fact-loading")
    assert second.returncode == 0, second.stderr
    ends = {line.partition(":")[0]: line.endswith("known") for line in second.stdout.splitlines()[:3]}
    assert ends == {"fact-machine": True, "fact-border": True, "fact-loading": False}
    assert (state / "fact-border.json").read_text() == kept

    page = (state / "page.md").read_text()
    assert f"3 of {STEPS} steps" in page
    assert f"torch {torch.__version__}" in page
    assert "| fact-border | copies that fail inside of one page lock | 0 | ≤ 0 |  | met |" in page
    assert "| numbers-calls | | | | | not run |" in page
    assert "## Copies over a border of page locks" in page


@pytest.mark.slow
def test_results_of_another_machine_do_not_count(tmp_path: Path) -> None:
    keep(tmp_path, "fact-machine", [], machine="another GPU, torch 1")
    done = run("--quick", "--state", tmp_path, "--only", "fact-machine")
    assert done.returncode == 0, done.stderr
    assert "known" not in done.stdout
    assert json.loads((tmp_path / "fact-machine.json").read_text())["machine"] == MACHINE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "checks", "reason"),
    [
        (
            "fact-lock",
            [check("longest gap, ms", 150.0, 100.0, "MISSED"), check("error", 0, 0, "met")],
            "page-locking one chunk holds others up for 150 ms",
        ),
        (
            "fact-lock",
            [check("longest gap, ms", 1e6, 100.0, "MISSED"), check("error", 2, 0, "MISSED")],
            "the driver refuses to page-lock",
        ),
    ],
)
def test_a_result_that_makes_others_worthless_stops_it(
    tmp_path: Path, step: str, checks: list[dict[str, Any]], reason: str
) -> None:
    keep(tmp_path, step, checks)
    arguments = ("--quick", "--state", tmp_path, "--only", step, "fact-border")
    done = run(*arguments)
    assert done.returncode == 3
    assert reason in done.stderr
    assert not (tmp_path / "fact-border.json").exists()
    assert f"**Stopped**: {reason}" in (tmp_path / "page.md").read_text()

    assert run(*arguments, "--force").returncode == 0
    assert (tmp_path / "fact-border.json").exists()


@pytest.mark.slow
def test_an_arena_that_was_not_locked_stops_it(tmp_path: Path) -> None:
    keep(tmp_path, "numbers-calls", [], problem="the arena was not page-locked: its notice above says why")
    done = run("--quick", "--state", tmp_path, "--only", "numbers-calls", "numbers-memory")
    assert done.returncode == 3
    assert "| numbers-calls | | | | | FAILED: the arena was not" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_a_step_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    keep(tmp_path, "fact-machine", [], problem="Traceback\nOSError: no such thing")
    done = run("--quick", "--state", tmp_path, "--only", "fact-machine", "fact-border")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "| fact-machine | | | | | FAILED: OSError: no such thing |" in page
    assert "| fact-border | copies that fail" in page

    again = run("--quick", "--state", tmp_path, "--only", "fact-machine", "--again", "fact-machine")
    assert again.stdout.startswith("fact-machine: done"), again.stdout


@pytest.mark.slow
def test_without_capds_packages_it_says_what_to_bring_and_runs_what_needs_torch_alone(tmp_path: Path) -> None:
    bare = "sys.modules['msgspec'] = sys.modules['zarr'] = None"
    steps = ("fact-machine", "fact-rows", "numbers-memory")
    done = run("--quick", "--state", tmp_path, "--only", *steps, code=bare)
    assert done.returncode == 0, done.stderr
    assert "not installed: msgspec zarr." in done.stdout
    assert "pip install --no-index --no-deps --find-links wheels -t site msgspec zarr" in done.stdout
    assert sorted(file.stem for file in tmp_path.glob("*.json")) == ["fact-machine"]


@pytest.mark.fault
@pytest.mark.timeout(420)
def test_every_step_runs(tmp_path: Path) -> None:
    done = run("--quick", "--force", "--state", tmp_path)
    assert done.returncode == 0, done.stderr
    results = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert len(results) == STEPS
    assert {name: result["problem"] for name, result in results.items() if result["problem"]} == {}
    assert results["correctness"]["found"]["passed"] == results["compile"]["found"]["passed"] == 1
    page = (tmp_path / "page.md").read_text()
    assert "not run" not in page
    assert "FAILED" not in page
    assert page.count("\n## ") == STEPS + 1
