"""What cannot work is refused in one line that says what to do, before anything runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.cluster.dask_cluster import DaskCluster
from tests.kit.cluster.sources import varied_run
from tests.kit.store.cli import Result, run_capd

WITHOUT_DASK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("dask", "distributed"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocker())
from capd.cli.app import main
main(sys.argv[1:])
"""
OTHER_VERSION = """
import capd._version, capd.distributed.cluster.workers as workers
workers.__version__ = "0.0.1"
"""

# A worker with another file system in the place of the store.
HIDING = """
import pathlib
def is_dir(self, is_dir=pathlib.Path.is_dir):
    return str(self) != {run!r} and is_dir(self)
pathlib.Path.is_dir = is_dir
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return varied_run(tmp_path_factory.mktemp("refused"), long=4)


def one_line(result: Result) -> str:
    [line] = result.err.splitlines()
    assert result.out == ""
    return line


def test_without_dask_the_extra_is_named(run: Path) -> None:
    done = forking.run(
        [sys.executable, "-c", WITHOUT_DASK, "compare", str(run), "--scheduler", "processes"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert 'pip install "capd[distributed]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--scheduler", "spark"), 2, "use threads, processes, tcp://HOST:PORT or FILE.json"),
        (("--scheduler", "no.json"), 2, "there is no such file"),
        (("--scheduler", "processes", "--task-bytes", "lots"), 2, "--task-bytes"),
        (("--scheduler", "processes", "--memory-limit", "1MiB"), 2, "give --memory-limit 65MiB or more"),
        (("--checkpoint", "there"), 2, "--checkpoint is for tasks"),
        (("--task-bytes", "64MiB"), 2, "--task-bytes is for tasks"),
        (("--retries", "0"), 2, "--retries is for tasks"),
        (("--sweep-scale", "--memory-limit", "1GiB"), 2, "--memory-limit is for tasks"),
    ],
)
def test_options_that_mean_nothing(run: Path, options: tuple[str, ...], code: int, said: str) -> None:
    result = run_capd("compare", run, *options)

    assert said in one_line(result)
    assert result.code == code


@pytest.mark.slow  # it waits until the connection is given up
def test_a_scheduler_that_does_not_answer(run: Path) -> None:
    result = run_capd("verify", run, "--scheduler", "tcp://127.0.0.1:1")

    assert "the scheduler tcp://127.0.0.1:1 does not answer" in one_line(result)
    assert result.code == 1


def test_files_are_read_by_threads_alone(run: Path, tmp_path: Path) -> None:
    assert run_capd("export", run, "-o", tmp_path / "files").code == 0

    result = run_capd("compare", tmp_path / "files" / "bf16", "--scheduler", "processes")

    assert "`capd import` makes a run of them" in one_line(result)
    assert result.code == 2


def test_a_worker_of_another_version_is_named_with_both(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OTHER_VERSION)
    with DaskCluster(tmp_path, 1, preload=str(tmp_path / "other.py")) as cluster:
        result = run_capd("compare", run, "--scheduler", cluster.address)

    assert "has capd 0.0.1 (here " in one_line(result)
    assert result.code == 1


def test_a_worker_that_does_not_see_the_run_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "hide.py").write_text(HIDING.format(run=os.fspath(run)))
    with DaskCluster(tmp_path, 1, preload=str(tmp_path / "hide.py")) as cluster:
        result = run_capd("report", run, "-o", tmp_path / "r.html", "--scheduler", str(cluster.file))

    assert f"does not see {run}" in one_line(result)
    assert result.code == 1
    assert not (tmp_path / "r.html").exists()
