"""The kit's forked jobs (tests/kit/forking.py) are what cold ones are: the same process, losses, records and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import capd
from tests.integration import forked_job
from tests.kit import forking
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon, is_running, until
from tests.kit.tiers import rows

JOB = forked_job.__file__
Start = Callable[..., Any]
STARTS = (subprocess.run, forking.run)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "CAPD_ARENA_BYTES": str(8 << 20), **more}


def trained(
    start: Start, command: list[str], directory: Path, environ: dict[str, str], **options: Any
) -> Any:
    """What the job has told. Its own directory is the same for every way to start it."""
    done = start(
        [*command, JOB, str(directory / "result.json"), "a word"], env=environ, cwd=directory, input="heard",
        text=True, timeout=100, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    return json.loads((directory / "result.json").read_text()) | {"said": done.stderr}


def records(run: Path) -> dict[Any, bytes]:
    """Everything that the store holds of the run's tensors."""
    return {
        (
            series.path,
            record.iteration,
            record.micro_batch,
            tuple(record.shape),
            str(series.dtype),
        ): series.read(number).tobytes()
        for series in capd.open(run).series
        for number, record in enumerate(series.records)
    }


def test_a_forked_job_is_trained_and_captured_as_a_cold_one(daemon: Daemon, tmp_path: Path) -> None:
    told = []
    for start, run_id in zip(STARTS, ("cold", "forked"), strict=True):
        environ = environment(CAPD_ENDPOINT=daemon.endpoint, CAPD_RUN_ID=run_id, RANK="0")
        more = {"imports": forking.TRAINING} if start is forking.run else {}
        told.append(trained(start, [sys.executable], tmp_path, environ, **more))
    daemon.stop()
    held = [records(daemon.store / f"{run_id}.zarr") for run_id in ("cold", "forked")]

    cold, forked = told
    assert cold["facts"]["environment"].pop("CAPD_RUN_ID") != forked["facts"]["environment"].pop(
        "CAPD_RUN_ID"
    )
    assert forked["facts"].keys() == cold["facts"].keys()
    for name, fact in cold["facts"].items():
        assert forked["facts"][name] == fact, name
    del cold["facts"], forked["facts"]
    for result in told:
        result["said"] = result["said"].replace("forked", "cold")
    assert forked == cold
    assert forked["heard"] == "heard"
    assert forked["counters"]["committed"] > 10
    assert held[0] == held[1]
    assert len(held[0]) == forked["counters"]["committed"]


@pytest.mark.slow
def test_a_job_below_capd_run_may_be_a_stand_in(tmp_path: Path, runtime_dir: Path) -> None:
    environ = environment(OMP_NUM_THREADS="1")
    losses, held = [], []
    for name, python in (
        ("cold", sys.executable),
        ("forked", forking.stand_in_for(environ, imports=forking.TRAINING)),
    ):
        capd_run = [
            sys.executable,
            "-m",
            "capd",
            "run",
            "--store",
            "store",
            "--run-id",
            name,
            "--",
        ]
        losses.append(trained(subprocess.run, [*capd_run, python], tmp_path, environ)["losses"])
        held.append(records(tmp_path / "store" / f"{name}.zarr"))

    assert losses[0] == losses[1]
    assert held[0] == held[1] != {}


ENDS = {
    "well": "print('said')",
    "code": "import sys; sys.exit(7)",
    "words": "import sys; sys.exit('no')",
    "error": "def f(): 1 / 0\nf()",
    "interrupt": "raise KeyboardInterrupt",
    "hard": "import os; print('lost'); os._exit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "abort": "import os; os.abort()",
    "last words": "import atexit, threading, time\natexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('from a thread'))).start()",
    "no module": "import nowhere",
}


@pytest.mark.parametrize("name", rows(ENDS, ["error"]))
def test_a_forked_job_ends_as_a_cold_one(name: str, tmp_path: Path) -> None:
    code = ENDS[name]
    script = tmp_path / "script.py"
    script.write_text(code)
    python = forking.stand_in_for(os.environ)
    for words in (["-c", code], [str(script)], ["-u", str(script)]):
        cold = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
        forked = forking.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
        stood_in = subprocess.run([python, *words], capture_output=True, text=True, timeout=60)
        for other in (forked, stood_in):
            assert (other.returncode, other.stdout, other.stderr) == (
                cold.returncode,
                cold.stdout,
                cold.stderr,
            )


def test_the_jobs_of_one_program_have_one_parent_and_those_of_another_have_another() -> None:
    # The ranks of a node name their job by it.
    starter = (
        "import subprocess, sys\n"
        "for _ in range(2): subprocess.run([sys.argv[1], '-c', 'import os; print(os.getppid())'], check=True)"
    )
    python = forking.stand_in_for(os.environ)
    parents = [
        set(subprocess.check_output([sys.executable, "-c", starter, python], text=True, timeout=60).split())
        for _ in range(2)
    ]

    assert [len(each) for each in parents] == [1, 1]
    assert parents[0] != parents[1]


def test_a_job_whose_starter_is_gone_runs_all_the_same(tmp_path: Path) -> None:
    starter = "import os, subprocess, sys\nsubprocess.Popen(sys.argv[1:])\nos._exit(0)"
    python = forking.stand_in_for(os.environ)
    for place in map(str, range(5)):
        job = f"open({str(tmp_path / place)!r}, 'x')"
        subprocess.run([sys.executable, "-c", starter, python, "-c", job], check=True, timeout=60)

    until(lambda: len(list(tmp_path.iterdir())) == 5)


def test_a_module_runs_forked_as_it_runs_cold(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("import sys; print(__name__, __spec__.name, sys.argv, sys.path[0])")
    for words in (["-m", "some", "a"], ["-m", "nothing"], ["-m", "json.tool", "--help"]):
        cold, forked = (
            start([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            for start in STARTS
        )
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            cold.returncode,
            cold.stdout,
            cold.stderr,
        )


def test_a_forked_job_has_the_group_that_its_caller_asks_for() -> None:
    tell = "import os; print(os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), os.getppid())"
    for options, told in (
        ({"process_group": 0}, f"True False {os.getpid()}"),
        ({"start_new_session": True}, f"True True {os.getpid()}"),
        ({}, f"False False {os.getpid()}"),
    ):
        done = forking.run(
            [sys.executable, "-c", tell], capture_output=True, text=True, timeout=60, **options
        )
        assert done.stdout.strip() == told, done.stderr


def test_signals_go_through_a_stand_in_and_its_end_is_the_end_of_its_job(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    for number, code_of_end in ((signal.SIGTERM, 9), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -9)):
        with subprocess.Popen(
            [forking.stand_in_for(os.environ), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:  # fmt: skip
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            assert pid != process.pid
            process.send_signal(number)
            assert process.wait(30) == code_of_end
        until(lambda pid=pid: not is_running(pid))


def test_what_a_fork_cannot_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="start it with subprocess"):
        forking.Popen(["true"])
    with pytest.raises(AssertionError, match="start it with subprocess"):
        forking.Popen([sys.executable, "-c", ""], preexec_fn=os.getpid)
    python = forking.stand_in_for(os.environ)
    done = subprocess.run(
        [python, "-c", ""], env={**os.environ, "OMP_NUM_THREADS": "7"}, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    assert re.search("other values of OMP_NUM_THREADS", done.stderr)
