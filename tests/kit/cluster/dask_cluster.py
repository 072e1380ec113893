"""A Dask scheduler and its workers, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.kit.paths import REPOSITORY

START_S = 60.0
# Kills a worker that reads a series, whoever asks it: the fault of a record that breaks a library.
POISON = """
import os, signal
from capd.store.read.series import Series

def poisoned(self, number, region=..., read=Series.read):
    if {word!r} in self.path:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, number, region)

# Dask may load this twice.
if Series.read.__name__ == "read":
    Series.read = poisoned
"""
# Notes each task that begins.
COUNTING = """
import os
from capd.distributed.tasks import running

def counted(task, run_task=running.run_task):
    with open({log!r}, "a") as file:
        file.write(f"{{running.task_of(task).task}}\\n")
    return run_task(task)

# Dask may load this twice.
if running.run_task.__name__ == "run_task":
    running.run_task = counted
"""


def said(err: str) -> list[str]:
    """What a command said on stderr, without the progress that it tells each ten seconds of a slow machine."""
    return [line for line in err.splitlines() if not line.startswith('{"progress": ')]


class DaskCluster:
    """A scheduler with some workers of one thread. Leaving the block ends all of them."""

    def __init__(self, directory: Path, workers: int = 2, *, preload: str = "", **environment: str) -> None:
        self.file = directory / "scheduler.json"
        self._directory, self._workers, self._preload = directory, workers, preload
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        self._environment = {**os.environ, "PYTHONPATH": path, **environment}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._start("scheduler", "--port", "0", "--host", "127.0.0.1")
        self._wait(self.file.exists, "the scheduler")
        for _ in range(self._workers):
            preload = ["--preload", self._preload] if self._preload else []
            self._start("worker", "--nthreads", "1", "--local-directory", str(self._directory), *preload)
        logs = [self._directory / f"worker{number + 1}.log" for number in range(self._workers)]
        self._wait(lambda: all("Registered to" in log.read_text() for log in logs), "the workers")
        return self

    @property
    def address(self) -> str:
        """The address of the scheduler."""
        return str(json.loads(self.file.read_text())["address"])

    def _start(self, what: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "dask", what, "--scheduler-file", str(self.file), "--no-dashboard"]
        with (self._directory / f"{what}{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=self._environment)
            )

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_there():
            assert time.monotonic() < deadline, f"{what} did not start"
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for process in self._processes[::-1]:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
