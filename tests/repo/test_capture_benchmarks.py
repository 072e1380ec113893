"""The benchmarks of the capture path run and count rightly; what they measure is for quiet machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.objects.service import S3Service
from tests.kit.paths import REPOSITORY


@pytest.mark.fault
def test_steps_beside_a_stalled_daemon_are_measured_and_counted(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/stalled_daemon.py", "--rounds", "1", "--steps", "1"]
    command += ["--directory", str(tmp_path), "--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100, stdout=subprocess.PIPE, text=True)

    found = json.loads(result.read_text())
    assert list(found["variants"]) == ["none", "empty hooks", "stopped", "slow"]
    assert all(row["wall_ms"] > 0 for row in found["variants"].values())
    counters = found["counters"]
    assert counters["dropped"].keys() == {"arena_full"}
    assert counters["offered"] == counters["committed"] + sum(counters["dropped"].values())
    assert "bound 1.03" in done.stdout


@pytest.mark.fault
def test_scrapes_beside_captured_steps_are_counted(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/scrapes.py", "--rounds", "1", "--steps", "1", "--scrapes", "1"]
    command += ["--directory", str(tmp_path), "--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100, stdout=subprocess.PIPE, text=True)

    found = json.loads(result.read_text())
    assert list(found["wall_s"]) == ["alone", "scraped"]
    assert found["scraper"]["scrapes"] >= 1
    assert found["counters"]["offered"] == found["counters"]["committed"] > 0
    assert "bound 1.01" in done.stdout


@pytest.mark.fault
def test_top_beside_ranks_is_measured_on_both_sizes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/live/top.py", "--ranks", "2", "--seconds", "2", "--rounds", "1"]
    command += ["--directory", str(tmp_path), "--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100, stdout=subprocess.PIPE, text=True)

    found = json.loads(result.read_text())
    assert [(row["columns"], row["rows"]) for row in found["rows"]] == [(80, 24), (200, 80)]
    # Every figure changes each second.
    assert all(row["nbytes_s"] > 0 for row in found["rows"])
    assert "2 ranks on 200 × 80" in done.stdout


@pytest.mark.fault
def test_steps_beside_a_recorder_are_measured_and_what_is_kept_is_counted(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "benchmarks/live/recorder.py",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--long-steps",
        "40",
    ]
    command += ["--directory", str(tmp_path), "--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=110, stdout=subprocess.PIPE, text=True)

    found = json.loads(result.read_text())
    assert list(found["wall_s"]) == ["alone", "recorder", "keep"]
    run = found["runs"]["recorder"]
    assert run["offered"] == run["committed"] + run["in_flight"] + sum(run["dropped"].values())
    assert run["committed"] > 0
    assert run["window"]["keeps"][-1]["reason"] == "benchmark"
    assert found["spool_nbytes"]["altogether"] > 0
    assert found["long"]["run"]["committed"] == found["lost"] == 0
    assert "bound 1.02" in done.stdout


@pytest.mark.fault
def test_steps_beside_everything_live_are_measured(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/training_overhead.py", "--live", "--rounds", "1", "--steps", "1"]
    command += ["--directory", str(tmp_path), "--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=110, stdout=subprocess.PIPE, text=True)

    found = json.loads(result.read_text())
    assert list(found["wall_s"]) == ["alone", "watched"]
    assert found["dropped"] == 0
    assert found["daemon_mib"] > 0
    assert found["pages"] == 2 or "no pages" in done.stdout
    assert "bound 1.1" in done.stdout


@pytest.mark.fault
def test_steps_beside_an_upload_are_measured_and_counted(tmp_path: Path, s3_server: S3Service) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "benchmarks/upload.py",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--backlog-mib",
        "128",
    ]
    command += ["--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100, stdout=subprocess.PIPE, text=True)

    found = json.loads(result.read_text())
    assert list(found["wall_s"]) == ["alone", "uploading"]
    assert found["rate"]["mb"] > 100
    assert found["counters"]["offered"] == found["counters"]["committed"] > 0
    assert "bound 1.02" in done.stdout
