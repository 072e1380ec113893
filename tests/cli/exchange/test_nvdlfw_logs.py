"""`capd import` of statistics logs that nvdlfw-inspect itself wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from capd.store.read.store import open_store
from tests.kit.store.cli import Result

Capd = Callable[..., Result]
WRITE = """
import sys
from nvdlfw_inspect.logging import initialize_logger, make_default_statistics_logger
initialize_logger(sys.argv[1])
logger = make_default_statistics_logger()
for iteration in range(3):
    logger.log_scalar("decoder.1.mlp.fc1_activation_fp8_current_scaling_underflows%", 1.5 + iteration, iteration)
    logger.log_scalar("decoder.1.mlp.fc1_gradient_max", 1e-5, iteration)
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvdlfw_inspect", reason="the logs are written by nvdlfw-inspect itself")
    root = tmp_path_factory.mktemp("logs")
    subprocess.run([sys.executable, "-c", WRITE, root], check=True, timeout=60)
    return root


def test_statistics_become_scalars_that_say_how_they_were_rounded(
    capd: Capd, logs: Path, tmp_path: Path
) -> None:
    done = capd("import", logs, "--store", tmp_path / "runs", "--run-id", "te", "--json")

    assert (done.code, done.json["imported"], done.json["skipped"]) == (0, 6, [])
    store = open_store(tmp_path / "runs" / "te.zarr")
    found = store.scalar("decoder.1.mlp.fc1_activation_fp8_current_scaling_underflows%", rank=0)
    assert (found.iterations.tolist(), found.values.tolist()) == ([0, 1, 2], [1.5, 2.5, 3.5])
    assert store.scalar("decoder.1.mlp.fc1_gradient_max", rank=0).values.tolist() == [0, 0, 0]
    assert capd("import", logs, "--store", tmp_path / "runs", "--run-id", "te", "--json").json["already"] == 6


def test_lines_that_are_no_statistic_are_named(capd: Capd, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x_globalrank-3.log"
    log.parent.mkdir()
    line = "2026-01-01 00:00:00,000 - INFO - a_max \t\t\t\t iteration=000004 \t\t\t\t value={}\n"
    log.write_text(
        line.format("2.5000") + "nonsense\n" + line.format("nan") + "x" * 100_000 + "\n" + line.format("what")
    )

    done = capd("import", tmp_path / "logs", "--store", tmp_path / "runs", "--run-id", "te", "--json")

    assert (done.code, done.json["imported"]) == (1, 2)
    assert all("is no statistic" in one["reason"] for one in done.json["skipped"])
    values = open_store(tmp_path / "runs" / "te.zarr").scalar("a_max", rank=3).values
    assert values[0] == 2.5
    assert values[1] != values[1]


LINE = "2026-01-01 00:00:00,000 - INFO - a_max \t\t\t\t iteration={:06d} \t\t\t\t value={}\n"


def test_a_log_that_grew_adds_its_new_lines_alone(capd: Capd, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x_globalrank-0.log"
    log.parent.mkdir()
    options = ("--store", tmp_path / "runs", "--run-id", "te", "--json")
    log.write_text(LINE.format(0, "0.5000") + LINE.format(1, "1.2345")[:-4])

    first = capd("import", log.parent, *options)
    log.write_text(LINE.format(0, "0.5000") + LINE.format(1, "1.2345") + LINE.format(2, "2.5000"))
    second = capd("import", log.parent, *options)

    assert (first.code, first.json["imported"]) == (1, 1)
    assert "has no end" in first.json["skipped"][0]["reason"]
    assert (second.code, second.json["imported"], second.json["already"]) == (0, 2, 1)
    found = open_store(tmp_path / "runs" / "te.zarr").scalar("a_max", rank=0)
    assert (found.iterations.tolist(), found.values.tolist()) == ([0, 1, 2], [0.5, 1.2345, 2.5])


def test_a_log_of_another_kind_is_read_in_linear_time_and_its_lines_are_counted(
    capd: Capd, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "x_globalrank-0.log"
    log.parent.mkdir()
    hostile = "2026-01-01 00:00:00,000 - INFO - x" + " " * 8000 + "y\n"
    log.write_text(hostile * 2000 + LINE.format(0, "0.5000") + "z" * 50_000 + "\n")

    done = capd("import", log.parent, "--store", tmp_path / "runs", "--run-id", "te", "--json")

    assert (done.code, done.json["imported"], len(done.json["skipped"])) == (1, 1, 17)
    # The long line is one line.
    assert done.json["skipped"][-1]["reason"] == "1,985 more lines are no statistic"


def test_links_ranks_and_numbers_that_no_job_has_are_named(capd: Capd, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "x_globalrank-0.log").write_text(LINE.format(0, "1e999") + LINE.format(0, "inf"))
    (logs / "x_globalrank-99999999999.log").write_text(LINE.format(0, "1.0000"))
    (logs / "y_globalrank-1.log").symlink_to("/etc/hostname")

    done = capd("import", logs, "--store", tmp_path / "runs", "--run-id", "te", "--json")

    assert (done.code, done.json["imported"], done.json["files"]) == (1, 1, 3)
    reasons = [one["reason"] for one in done.json["skipped"]]
    for reason, part in zip(
        reasons, ["is no statistic", "a rank that no job has", "symbolic link"], strict=True
    ):
        assert part in reason


def test_logs_of_messages_are_passed_over(capd: Capd, tmp_path: Path) -> None:
    for directory, text in (
        ("nvdlfw_inspect_logs", "2026-01-01 00:00:00,000 - INFO - Reading config from x.\n"),
        ("nvdlfw_inspect_statistics_logs", LINE.format(0, "0.5000")),
    ):
        (tmp_path / "logs" / directory).mkdir(parents=True)
        (tmp_path / "logs" / directory / "x_globalrank-0.log").write_text(text)

    done = capd("import", tmp_path / "logs", "--store", tmp_path / "runs", "--json")

    assert (done.code, done.json["files"], done.json["imported"], done.json["skipped"]) == (0, 1, 1, [])
