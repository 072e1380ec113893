"""A collection in a real terminal: the progress below the job's output, and Ctrl-C once and twice."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.jobs.collecting import JOB, arguments, jobs, state_of
from tests.kit.processes import until

# A session of its own, whose terminal stdin is: so that a Ctrl-C there reaches the foreground group, and it alone.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
CTRL_C = b"\x03"

pytestmark = pytest.mark.timeout(150)


class Terminal:
    """A terminal with a command in it, and what was shown there until now."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.fd, inside = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command], cwd=directory, stdin=inside, stdout=inside, stderr=inside,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        )  # fmt: skip
        os.close(inside)
        self.shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self.fd, 1 << 16):
                self.shown += chunk
        except OSError:  # everybody has left it
            return

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        os.close(self.fd)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Terminal]:
    """A collection in a terminal whose job trains no further."""
    options = ("--mode", "quick", "--control-iter", "1", "--run-id", "r")
    # bash waits by its own command, which a signal ends. A child that it has only just made for `sleep` swallows the
    # signal, and bash would wait for it.
    job = ("bash", "-c", "trap 'echo told; sleep 600' TERM; sleep 600 & echo deaf; wait; sleep 600")
    terminal = Terminal(arguments(*options, job=job), tmp_path)
    yield terminal
    for pid in jobs(tmp_path, "sleep"):
        os.kill(pid, 9)
    terminal.close()


@pytest.mark.slow
def test_a_ctrl_c_ends_the_job_gently_and_names_the_type(tmp_path: Path) -> None:
    command = arguments(
        "--mode", "single", "--control-iter", "9", "--run-id", "r", job=(*JOB, "--hang", "mxfp8")
    )
    terminal = Terminal(command, tmp_path)
    try:
        until(lambda: b"hanging" in terminal.shown, 100)
        until(lambda: b"2 of 9 micro-batches \xc2\xb7" in terminal.shown, 30)
        terminal.press(CTRL_C)
        assert terminal.process.wait(60) == 130
    finally:
        terminal.close()

    assert b"continues run r" in terminal.shown
    assert b"disk left" in terminal.shown
    assert b"Traceback" not in terminal.shown
    assert state_of(tmp_path / "store" / "r.zarr")["mxfp8"]["outcome"] == "interrupted"
    until(lambda: jobs(tmp_path) == jobs(tmp_path, "serve") == [])


def test_a_second_ctrl_c_does_not_wait_for_a_job_that_does_not_hear(
    hanging: Terminal, tmp_path: Path
) -> None:
    until(lambda: b"deaf" in hanging.shown, 60)
    hanging.press(CTRL_C)
    until(lambda: b"told" in hanging.shown)  # else both keys may be one signal to a busy machine
    with pytest.raises(subprocess.TimeoutExpired):
        hanging.process.wait(1)  # the job has a minute to end
    hanging.press(CTRL_C)

    assert hanging.process.wait(30) == 130
    assert b"Traceback" not in hanging.shown
    until(lambda: jobs(tmp_path, "sleep") == jobs(tmp_path, "serve") == [])
