"""Jobs that `capd run --mode` and `capd plan` end: with whatever they have started, and whenever they are asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capd.cli.jobs import process_group
from capd.cli.run.planned_job import PlannedJob
from tests.kit.processes import is_running, until


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], PlannedJob]]:
    """`job(script)`: of a shell. What it leaves behind is killed with the test."""

    def make(script: str) -> PlannedJob:
        environ = {**os.environ, "AT": str(tmp_path), "CAPD_PLAN": str(tmp_path)}
        return PlannedJob(["bash", "-c", script], environ, tmp_path)

    yield make
    for pid in written(tmp_path):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def written(directory: Path) -> list[int]:
    """The process ids that a script has written, one per file."""
    return [int(text) for file in directory.glob("pid*") if (text := file.read_text().strip())]


SAVES = "trap 'sleep 0.3; echo saved > $AT/saved; exit' TERM; echo $BASHPID > $AT/pid1; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    "script",
    [
        f"({SAVES})\nexit 0",  # a shell that does not hear the signal before its child has ended, or dies of it
        f"({SAVES}) & wait",
        f"({SAVES}) | cat",
        f"setsid bash -c '{SAVES.replace(chr(39), chr(34))}' & wait",
        f"setsid -f bash -c '{SAVES.replace(chr(39), chr(34))}'; sleep 600",
    ],
    ids=["child", "background", "pipeline", "session", "daemon"],
)
def test_whatever_form_a_job_has_its_training_may_save_before_it_ends(
    script: str, job: Callable[[str], PlannedJob], tmp_path: Path
) -> None:
    with job(script) as running:
        running.start()
        until(lambda: written(tmp_path))
        [pid] = written(tmp_path)

    assert (tmp_path / "saved").read_text() == "saved\n"
    assert not is_running(pid)


def test_of_a_job_that_failed_by_itself_nothing_goes_on(
    job: Callable[[str], PlannedJob], tmp_path: Path
) -> None:
    """A launcher that is killed leaves its workers, with their memory, to the next job."""
    with job("sleep 600 & echo $! > $AT/pid1; setsid sleep 600 & echo $! > $AT/pid2; kill -9 $$") as running:
        running.start()
        assert running.wait(30, all_nodes=False) == -signal.SIGKILL
        pids = written(tmp_path)

    assert len(pids) == 2
    until(lambda: not any(map(is_running, pids)))  # what is killed is gone a moment later


def test_a_job_that_is_stopped_hears_its_end(job: Callable[[str], PlannedJob], tmp_path: Path) -> None:
    with job(SAVES) as running:
        running.start()
        until(lambda: written(tmp_path))
        running.process.send_signal(signal.SIGSTOP)

    assert running.process.returncode == 0
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("signum", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_a_signal_amid_the_start_leaves_nothing_behind(
    signum: signal.Signals,
    raised: type[BaseException],
    job: Callable[[str], PlannedJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(really(*args, **kwargs))
        signal.raise_signal(signum)  # when the process is there, and nobody knows of it yet
        return started[0]

    monkeypatch.setattr(process_group.subprocess, "Popen", popen)
    before = signal.getsignal(signum)
    with pytest.raises(raised), job("exec sleep 600") as running:
        running.start()

    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signum) == before


PLANNED = """
with PlannedJob(command, dict(os.environ), Path.cwd()) as job:
    job.start()
    code = job.process.wait()
"""
PLAIN = """
with ForegroundJob() as job:
    code = job.run(command, dict(os.environ))
"""


@pytest.mark.parametrize("job", [PLANNED, PLAIN], ids=["collected", "plain"])
def test_what_nohup_has_ignored_stays_ignored_in_the_job_too(job: str, tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from capd.cli.jobs.foreground import ForegroundJob
from capd.cli.run.planned_job import PlannedJob
command = ["bash", "-c", "kill -HUP $PPID; kill -HUP $$; echo went on > said"]
{job}
raise SystemExit(code)
"""
    command = ["nohup", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == "went on\n"


def test_whoever_asks_twice_does_not_leave_a_job_behind(
    job: Callable[[str], PlannedJob], tmp_path: Path
) -> None:
    def run() -> None:
        with running:
            running.start()
            until(lambda: written(tmp_path))
            # By then the job's end is waited for.
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    running = job("trap '' TERM; sleep 600 & echo $! > $AT/pid1; wait; wait")
    with pytest.raises(SystemExit):
        run()

    assert running.process.returncode == -signal.SIGKILL
    until(lambda: not any(map(is_running, written(tmp_path))))
