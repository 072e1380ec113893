"""`run_tensor_draw.sh` by its old command lines: a small transformer is collected, and what there is is drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import capd

SCRIPT = Path(__file__).parents[3] / "examples" / "megatron" / "run_tensor_draw.sh"
JOB = Path(__file__).parents[1] / "collections" / "collect_job.py"
NAMES = {"global_statistics.json", "global_statistics_report.txt", "quant_types.png", "overflow.png"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the script is run: a training script that takes five arguments, and data."""
    (tmp_path / "train.sh").write_text(f'exec "{sys.executable}" "{JOB}" --checkpoint "$1.step"\n')
    (tmp_path / "text").write_text("data")
    return tmp_path


def draw(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"TRAIN_SCRIPT": str(place / "train.sh"), "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True, text=True, timeout=280, cwd=place, check=False, env={**os.environ, **environ},
    )  # fmt: skip


def drawn(place: Path, directory: str = "draw") -> dict[str, int]:
    """Records by quant type of the report in a directory."""
    assert {path.name for path in (place / directory).iterdir()} >= NAMES
    document = json.loads((place / directory / "global_statistics.json").read_text())
    return {group["quant_type"]: group["records"] for group in document["by"]["quant_type"]}


def collected(place: Path) -> list[set[tuple[int, int]]]:
    """The micro-batches of each run."""
    runs = sorted((place / "enhanced_tensor_logs").glob("*.zarr"))
    records = ((one for series in capd.open(run).find() for one in series.records) for run in runs)
    return [{(record.iteration, record.micro_batch) for record in of_run} for of_run in records]


@pytest.mark.fault
def test_both_collects_and_draws_and_what_is_collected_later_is_drawn_with_it(place: Path) -> None:
    first = draw(place, "both", "mxfp8", "--data-path", "text")
    assert first.returncode == 0, first.stderr
    assert set(drawn(place)) == {"mxfp8"}
    assert collected(place) == [{(0, 0)}]

    more = ("--control-iter", "3", "--collect-micro-batches", "2", "--data-path", "text")
    second = draw(place, "--mode", "both", "--quant-type", "hifp8", *more)
    assert second.returncode == 0, second.stderr
    by_type = drawn(place)
    assert set(by_type) == {"mxfp8", "hifp8"}
    assert by_type["hifp8"] > by_type["mxfp8"]
    assert {(0, 0), (0, 1), (1, 0)} in collected(place)

    assert draw(place).returncode == 0
    assert drawn(place) == by_type


@pytest.mark.fault
def test_options_say_where_tensors_are_and_where_figures_go(place: Path) -> None:
    where = ("--tensor-dir", "./tensors")
    only = draw(place, "--mode", "collect", "--quant-type", "bf16", *where, "--data-path", "text")

    assert only.returncode == 0, only.stderr
    assert not (place / "draw").exists()
    done = draw(place, "--mode", "visualize", *where, "--output-dir", "./figures", "--max-workers", "2")
    assert done.returncode == 0, done.stderr
    assert set(drawn(place, "figures")) == {"bf16"}


@pytest.mark.slow
def test_tensor_savers_files_are_drawn_where_they_lie(place: Path) -> None:
    arguments = ("collect", "bf16", "--tensor-dir", "./run", "--data-path", "text")
    assert draw(place, *arguments).returncode == 0
    export = [sys.executable, "-m", "capd", "export", "run", "--out", "enhanced_tensor_logs"]
    subprocess.run(export, cwd=place, check=True, capture_output=True, timeout=60)

    done = draw(place, "visualize")

    assert done.returncode == 0, done.stderr
    assert drawn(place) == {"bf16": len(list((place / "enhanced_tensor_logs").rglob("*.pt")))}


@pytest.mark.fault
def test_a_collection_that_fails_draws_what_there_is_and_says_so(place: Path) -> None:
    assert draw(place, "both", "bf16", "--data-path", "text").returncode == 0
    (place / "train.sh").write_text("exit 3\n")

    failed = draw(place, "both", "mxfp4", "--data-path", "text")
    without = draw(place, "both", "--data-path", "nowhere", "--tensor-dir", "nothing")

    assert failed.returncode == 1
    assert set(drawn(place)) == {"bf16"}
    assert without.returncode != 0


def test_what_it_does_not_know_is_a_usage_error(place: Path) -> None:
    for arguments in (("--mode", "draw"), ("--colour", "red"), ("paint",)):
        done = draw(place, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "usage: " in done.stderr
