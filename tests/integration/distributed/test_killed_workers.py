"""Workers and commands that are killed: the result is the same, what cannot be read is named, nothing runs twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.cluster.dask_cluster import COUNTING, POISON, DaskCluster, said
from tests.kit.cluster.sources import wide_run
from tests.kit.store.cli import run_capd

SERIES, WORKERS = 48, 2
ONE_EACH = ("--task-bytes", "128KiB")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_run(tmp_path_factory.mktemp("wide"), SERIES)


@pytest.fixture
def counting(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A log of the tasks that begin, and the environment in which workers write it."""
    log, preload = tmp_path / "tasks.log", tmp_path / "counting.py"
    log.touch()
    preload.write_text(COUNTING.format(log=str(log)))
    # A killed command leaves its directory there.
    return log, {"DASK_DISTRIBUTED__WORKER__PRELOAD": json.dumps([str(preload)]), "TMPDIR": str(tmp_path)}


def begun(run: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "capd", "compare", str(run), "--json", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The workers below a command: its children that run tasks."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(log: Path, tasks: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(log.read_text().splitlines()) < tasks:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_three_killed_workers_change_nothing(run: Path, counting: tuple[Path, dict[str, str]]) -> None:
    log, environment = counting
    process = begun(run, "--scheduler", "processes", "--workers", str(WORKERS), *ONE_EACH, **environment)
    killed = 0
    for tasks in (4, 12, 20):
        wait_for(log, tasks, process)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        killed += 1
    out, err = process.communicate(timeout=100)

    assert (process.returncode, said(err), killed) == (0, [], 3)
    assert out == run_capd("compare", run, "--json").out
    assert len(log.read_text().splitlines()) > SERIES


@pytest.mark.slow
def test_a_shard_that_kills_its_workers_is_skipped_and_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "poison.py").write_text(POISON.format(word="blocks.7.fc"))
    with DaskCluster(
        tmp_path,
        WORKERS,
        preload=str(tmp_path / "poison.py"),
        DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="1",
    ) as cluster:
        found = run_capd("compare", run, "--json", "--scheduler", cluster.address, "--task-bytes", "600KiB")
        pairs = run_capd(
            "compare", run, run, "--json", "--scheduler", cluster.address, "--task-bytes", "600KiB"
        )
        checked = run_capd("verify", run, "--json", "--scheduler", cluster.address)

    [skipped] = found.json["skipped"]
    assert found.code == 4
    assert "blocks.7.fc.forward.input#0" in skipped["name"]
    assert skipped["reason"] == "2 workers died while they read it"
    assert len(said(found.err)) == 1
    others = ",".join(str(layer) for layer in range(SERIES) if layer != 7)
    assert found.json["all"] == run_capd("compare", run, "--json", "--layer", others).json["all"]
    assert (pairs.code, pairs.json["all"]["pairs"]) == (4, SERIES - 1)
    # A check reads bytes, no tensors.
    assert (checked.code, checked.json["records"]) == (0, SERIES)


@pytest.mark.slow
def test_a_checkpoint_goes_on_where_a_killed_command_was(
    run: Path, tmp_path: Path, counting: tuple[Path, dict[str, str]]
) -> None:
    log, environment = counting
    options = (
        "--scheduler",
        "processes",
        "--workers",
        str(WORKERS),
        *ONE_EACH,
        "--checkpoint",
        str(tmp_path / "c"),
    )
    process = begun(run, *options, **environment)
    wait_for(log, SERIES // 2, process)
    process.kill()
    process.communicate()

    second = run_capd("compare", run, "--json", *options, **environment)
    third = run_capd("compare", run, "--json", *options, **environment)

    assert second.out == third.out == run_capd("compare", run, "--json").out
    ran = Counter(log.read_text().split())
    assert set(ran) == {str(number) for number in range(SERIES)}
    # Those that were running, or done and not yet noted, when the command was killed.
    assert sum(ran.values()) - SERIES <= 4 * WORKERS
    assert max(ran.values()) <= 2


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_its_workers(run: Path, counting: tuple[Path, dict[str, str]]) -> None:
    log, environment = counting
    process = begun(run, "--scheduler", "processes", "--workers", str(WORKERS), *ONE_EACH, **environment)
    wait_for(log, 4, process)
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out, said(err)) == (130, "", [])
    deadline = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
