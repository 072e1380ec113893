"""A daemon that is stopped, absent, or on a slow disk: the training thread calls nothing that could wait for it.

The job counts, for its own thread and while it captures, every call of the interpreter's waiting functions and every
audited operation (files, sockets, sleeps, processes). Speed is not asserted, on any machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.kit.tracing import injected, needs_strace
from tests.kit import forking
from tests.kit.checking import assert_balanced
from tests.kit.processes import Daemon, live_stats

STEPS, MIB = 60, 1 << 20
JOB = """
    import json, sys, threading, time
    import torch
    import capd_client, capd_client.api

    steps = int(sys.argv[1])
    main, capturing, waits = threading.get_ident(), False, []

    def note(name):
        if capturing and threading.get_ident() == main:
            waits.append(name)

    def counted(owner, name):
        original = getattr(owner, name)
        def call(*arguments, **options):
            note(f"{owner.__name__}.{name}")
            return original(*arguments, **options)
        setattr(owner, name, call)

    for owner in (threading.Condition, threading.Event):
        counted(owner, "wait")
    counted(threading.Thread, "join")
    counted(time, "sleep")

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = capd_client.watch(model, steps="all")
    large = torch.zeros(40_000)

    def step():
        global capturing
        capturing = True
        model(torch.randn(16, 64)).square().mean().backward()
        capd_client.capture(large, tensor_name="large")
        capd_client.capture(large[::2], tensor_name="strided")
        capturing = False
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    if sys.argv[2] == "present":
        while capd_client.api.session().transport.welcome is None:
            time.sleep(0.01)
        assert capd_client.flush(30)
    print("ready", flush=True)
    sys.stdin.readline()
    waits.clear()
    outside = ("open", "os.", "socket.", "fcntl.", "subprocess.", "time.", "mmap.")
    sys.addaudithook(lambda event, _: note(event) if event.startswith(outside) else None)
    for _ in range(steps):
        step()
    stuck = capd_client.counters()
    print(json.dumps({"waits": waits, "counters": stuck}), flush=True)
    sys.stdin.readline()
    flushed = capd_client.flush(60)
    print(json.dumps({"flushed": flushed, "counters": capd_client.counters()}), flush=True)
"""


class Job:
    """The training job, told when to go on."""

    def __init__(self, directory: Path, endpoint: str, daemon: str, **environment: str) -> None:
        script = directory / "job.py"
        script.write_text(textwrap.dedent(JOB))
        env = {
            **os.environ,
            "CAPD_ENDPOINT": endpoint,
            "CAPD_RUN_ID": "run",
            "CAPD_ARENA_BYTES": str(2 * MIB),
            "CAPD_PING_S": "0.3",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[3]),
            **environment,
        }
        self.process = forking.popen(
            [sys.executable, str(script), str(STEPS), daemon],
            imports=forking.TRAINING,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def go_on(self) -> dict[str, Any]:
        """Let it do its next part; what it says then."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said: dict[str, Any] = json.loads(self._line())
        return said

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the job ended with {self.process.wait(10)}"
        return line.strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def a_job(directory: Path, endpoint: str, daemon: str = "present", **environment: str) -> Iterator[Job]:
    job = Job(directory, endpoint, daemon, **environment)
    try:
        yield job
    finally:
        job.close()


def assert_did_not_wait(said: dict[str, Any]) -> None:
    """Every step was taken with the arena full most of the time, and nothing was called that waits."""
    counters = said["counters"]
    assert said["waits"] == []
    assert counters["dropped"].get("arena_full", 0) > STEPS
    assert counters["offered"] == counters["committed"] + counters["in_flight"] + sum(
        counters["dropped"].values()
    )


def test_training_waits_for_no_daemon_that_is_stopped(daemon: Daemon, tmp_path: Path) -> None:
    with a_job(tmp_path, daemon.endpoint) as job:
        daemon.send(signal.SIGSTOP)
        stopped = job.go_on()
        daemon.send(signal.SIGCONT)
        end = job.go_on()

        assert_did_not_wait(stopped)
        assert end["flushed"]
        assert_balanced(end["counters"])
        assert end["counters"]["committed"] > stopped["counters"]["committed"]
        [session] = live_stats(daemon.endpoint)["sessions"]
        assert session["committed"] == end["counters"]["committed"]


@pytest.mark.slow
def test_training_waits_for_no_slow_disk(daemon: Daemon, tmp_path: Path) -> None:
    """Each write takes a third of a second."""
    needs_strace()
    assert daemon.process is not None
    with a_job(tmp_path, daemon.endpoint) as job:
        with injected(daemon.process.pid, "pwrite64,pwritev,write,writev,fdatasync", "delay_enter=300000"):
            slow = job.go_on()
        end = job.go_on()

        assert_did_not_wait(slow)
        assert end["flushed"]
        assert_balanced(end["counters"])
        assert daemon.anonymous_nbytes() < 256 * MIB


@pytest.mark.parametrize("policy", [pytest.param("drop", marks=pytest.mark.fault), "block"])
def test_training_waits_for_no_daemon_that_is_absent(policy: str, tmp_path: Path, runtime_dir: Path) -> None:
    """Under policy block it waits once, for the time that was stated, and not again."""
    with a_job(
        tmp_path, f"unix:{runtime_dir}/nobody", "absent", CAPD_POLICY=policy, CAPD_MAX_BLOCK_MS="50"
    ) as job:
        said = job.go_on()
        if policy == "block":
            assert said["waits"] in ([], ["Condition.wait"])
            said["waits"] = []
        assert_did_not_wait(said)
