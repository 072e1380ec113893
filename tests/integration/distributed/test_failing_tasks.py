"""Tasks that fail or answer nonsense: the command ends with one line, whatever the error was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cluster.dask_cluster import said
from tests.kit.cluster.faults import failing_task
from tests.kit.cluster.sources import wide_run
from tests.kit.store.cli import Result, run_capd

CLUSTER = ("--scheduler", "processes", "--workers", "2", "--task-bytes", "128KiB")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_run(tmp_path_factory.mktemp("failing"), 12)


def compared(run: Path, directory: Path, fault: str, *options: str) -> Result:
    environment = failing_task(directory, fault) if fault else {}
    return run_capd("compare", run, "--json", *CLUSTER, *options, TMPDIR=str(directory), **environment)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("deep()", "a task failed on a worker: RecursionError: maximum recursion depth exceeded"),
        pytest.param(
            "raise SystemExit(3)", "a task failed on a worker: SystemExit: 3", marks=pytest.mark.slow
        ),
        pytest.param("return b'\\x93noise'", "this is no partial result", marks=pytest.mark.slow),
        pytest.param("return None", "this is no partial result", marks=pytest.mark.slow),
    ],
)
def test_a_task_that_fails_ends_the_command_with_one_line(
    run: Path, tmp_path: Path, fault: str, message: str
) -> None:
    result = compared(run, tmp_path, fault, "--retries", "1")

    assert (result.code, result.out) == (1, "")
    [line] = said(result.err)
    assert message in line
    # The scheduler has files of its own there.
    assert [path.name for path in tmp_path.iterdir()] == ["failing.py"]


@pytest.mark.slow
def test_a_checkpoint_does_not_keep_what_could_not_be_read(run: Path, tmp_path: Path) -> None:
    options = ("--checkpoint", str(tmp_path / "checkpoint"))
    first = compared(run, tmp_path, "raise MemoryError", *options)
    second = compared(run, tmp_path, "", *options)

    assert (first.code, len(first.json["skipped"])) == (4, 1)
    assert "a worker had not enough memory for it" in first.json["skipped"][0]["reason"]
    assert (second.code, second.out) == (0, run_capd("compare", run, "--json").out)
