"""capd in jobs of a real Slurm: the files of deploy/slurm, two steps on one daemon, and every end of a job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import capd
from tests.kit.daemon import wait_for
from tests.kit.paths import REPOSITORY
from tests.kit.processes import capd as command
from tests.kit.processes import daemons_on
from tests.kit.services.slurm import KILL_WAIT_S, Slurm, slurm, why_not

DEPLOY = REPOSITORY / "deploy" / "slurm"
JOB = Path(__file__).with_name("slurm_job.py")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    if missing := why_not():
        pytest.skip(missing)
    # A job's user must reach it, and the sockets in it have short paths.
    directory = Path(tempfile.mkdtemp(prefix="capd-s-", dir="/tmp"))
    try:
        programs = {"Prolog": DEPLOY / "prolog.sh", "Epilog": DEPLOY / "epilog.sh"}
        settings = {name: str(path) for name, path in programs.items()}
        with slurm(
            directory, PrologFlags="Alloc", TaskProlog=str(DEPLOY / "task_prolog.sh"), **settings
        ) as made:
            yield made
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # The prolog made it. A daemon of the machine may use it.
        with contextlib.suppress(OSError):
            Path("/run/capd").rmdir()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of every job: this capd is the one on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "capd").write_text(f'#!/bin/sh\nexec {sys.executable} -m capd "$@"\n')
    (programs / "capd").chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "CAPD_STORE": str(tmp_path / "store"),
        "RANK": "0",
    }


def batch(text: str, directory: Path) -> Path:
    path = directory / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}")
    return path


def values(run: Path) -> dict[int, list[int]]:
    """The numbers of the records, by attempt."""
    found: dict[int, list[int]] = {}
    for series in capd.open(run).series:
        for number, record in enumerate(series.records):
            assert (series.numpy(number) == record.iteration).all()
            found.setdefault(record.attempt, []).append(int(record.iteration or 0))
    return found


def script_of_the_page(store: Path, directory: Path) -> Path:
    """The script of docs/cluster.md, with this test's store and job."""
    section = (REPOSITORY / "docs" / "cluster.md").read_text().partition("\n## Slurm\n")[2]
    [text, *_] = re.findall(r"^```bash\n(#!.*?)^```$", section, re.MULTILINE | re.DOTALL)
    text, changed = re.subn(r"torchrun .*?train\.py", f"{sys.executable} {JOB} 20", text, flags=re.DOTALL)
    assert changed == 1
    assert len(text.splitlines()) <= 15
    path = directory / "page.sh"
    path.write_text(text.replace("/shared/captures", str(store)))
    return path


@pytest.mark.parametrize("script", ["capd.sbatch", pytest.param("docs/cluster.md", marks=pytest.mark.slow)])
def test_two_steps_share_a_daemon_that_the_script_ends(
    script: str, cluster: Slurm, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The shipped script, and the one to copy: they would hang until the time limit if nothing ended the daemon."""
    store = Path(environment["CAPD_STORE"])
    shipped = f"{DEPLOY / 'capd.sbatch'} {sys.executable} {JOB} 20"
    job = cluster.submit(
        shipped if script == "capd.sbatch" else script_of_the_page(store, tmp_path),
        "--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=1", "--time=5", **environment,
    )  # fmt: skip

    assert cluster.wait_end(job) == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    assert "rank 0: 20 committed" in output
    assert "the daemon stopped, everything is sealed" in output
    assert "shutdown_timeout_s is 20 instead of 30, because Slurm kills" in output
    assert values(store / f"slurm-{job}.zarr") == {0: list(range(20))}
    assert daemons_on(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["scancel", "time limit"])
def test_a_job_that_is_ended_loses_nothing_acknowledged(
    end: str, cluster: Slurm, tmp_path: Path, environment: dict[str, str]
) -> None:
    store, told = Path(environment["CAPD_STORE"]), tmp_path / "told"
    # A minute is the least limit. Slurm sends the signal up to 30 s early, at one of its looks every 30 s.
    job = cluster.submit(
        f"{DEPLOY / 'capd.sbatch'} {sys.executable} {JOB} 5 {told}",
        "--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=1", "--time=1", "--no-requeue", "--signal=B:TERM@5",
        **environment,
    )  # fmt: skip
    cluster.wait(job, told.exists, "captures")
    if end == "scancel":
        cluster.run("scancel", job)
    assert cluster.wait_end(job, 150) == ("CANCELLED" if end == "scancel" else "TIMEOUT")
    wait_for(lambda: daemons_on(store) == [], "the daemon's end", KILL_WAIT_S + 10)

    committed = int(told.read_text().split()[-1])
    run = store / f"slurm-{job}.zarr"
    [numbers] = values(run).values()
    assert numbers[:committed] == list(range(committed))
    assert command("verify", str(run)).returncode == 0
    # In order, and not by SIGKILL: nothing is left in the spool.
    assert "stopped after" in cluster.output(job)
    assert not list(run.glob(".capd/*/spool/*"))
    if end == "time limit":
        assert "all captures are committed" in cluster.output(job)


@pytest.mark.slow
def test_a_requeued_job_goes_on_in_its_run_with_the_next_attempts(
    cluster: Slurm, tmp_path: Path, environment: dict[str, str]
) -> None:
    store, told = Path(environment["CAPD_STORE"]), tmp_path / "told"
    script = batch(
        f"""
        export CAPD_RUN_ID=slurm-$SLURM_JOB_ID CAPD_ENDPOINT=unix:/tmp/capd-$SLURM_JOB_ID/capd.sock
        srun --overlap capd serve &
        if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then srun --overlap {sys.executable} {JOB} 5 {told}; fi
        srun --overlap {sys.executable} {JOB} 7
        capd ctl shutdown
        """,
        tmp_path,
    )
    job = cluster.submit(script, "--time=5", "--requeue", **environment)
    cluster.wait(job, told.exists, "captures")
    cluster.run("scontrol", "requeue", job)

    def first_life_ended() -> bool:
        return cluster.field(job, "JobState") == "PENDING" and cluster.node_state() == "idle"

    cluster.wait(job, first_life_ended, "the end of its first life")
    # Slurm lets a requeued job wait for two minutes. slurmd starts no job in the second in which it killed it.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    assert cluster.wait_end(job, 150) == "COMPLETED", cluster.output(job)
    assert cluster.field(job, "Restarts") == "1"
    attempts = values(store / f"slurm-{job}.zarr")
    assert sorted(attempts) == [0, 1000]
    assert attempts[1000] == list(range(7))
    assert attempts[0][:5] == list(range(5))


@pytest.mark.slow
def test_the_task_prolog_names_the_daemon_of_the_job_or_says_that_there_is_none(
    cluster: Slurm, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The prolog made the directory of the socket, for the job's user alone; the epilog removes it."""
    script = batch(
        f"""
        stat -c 'directory %a %u' /run/capd/job-$SLURM_JOB_ID
        CAPD=1 srun --overlap sh -c 'echo "before: $CAPD_ENDPOINT"'
        srun --overlap capd serve --once --endpoint unix:/run/capd/job-$SLURM_JOB_ID/capd.sock &
        until [ -S /run/capd/job-$SLURM_JOB_ID/capd.sock ]; do sleep 0.1; done
        srun --overlap sh -c 'echo "not asked: $CAPD_ENDPOINT"'
        CAPD=1 srun --overlap {sys.executable} {JOB} 4
        CAPD=1 srun --overlap sh -c 'echo "after: $CAPD_ENDPOINT $CAPD_RUN_ID"'
        wait
        """,
        tmp_path,
    )
    job = cluster.submit(script, "--time=5", CAPD_IDLE_SEAL_S="2", **environment)

    assert cluster.wait_end(job) == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    socket = f"/run/capd/job-{job}/capd.sock"
    assert "directory 700 0" in output
    assert "no daemon listens on" in output
    assert "before: \n" in output
    assert "not asked: \n" in output
    assert f"after: unix:{socket} slurm-{job}" in output
    assert "rank 0: 4 committed" in output
    wait_for(lambda: not Path(socket).parent.exists(), "the epilog")
