"""The process that makes one report: `capd report` at the lowest priority, with a limit of its file and of its time.

This module is also its first program: it binds the life of the process to that of the page, and becomes `capd report`.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ReportProcess", "main"]

_NICE = 19
_WORKERS = 2
_TAIL_NBYTES = 4096
_MAX_LINE_CHARS = 500
_PARENT_DEATH_SIGNAL = 1
_PREFIX = "capd: "
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class ReportProcess:
    """One `capd report` that runs. The thread that starts it must wait for it, because it ends with that thread."""

    def __init__(self, run: Path, out: Path, *, is_quick: bool, most_nbytes: int) -> None:
        """Start it.

        Args:
            run: The run.
            out: The page that it writes, in a directory of its own.
            is_quick: Whether stored statistics are enough.
            most_nbytes: The size that no file of it may pass.

        Raises:
            OSError: No process can be started.
        """
        command = [sys.executable, "-m", "capd", "report", str(run.absolute()), "-o", str(out)]
        options = ["--quick"] if is_quick else ["--workers", str(_WORKERS)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), str(most_nbytes), *command, *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            umask=0o077,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The number of the process, which is that of its group."""
        return self._process.pid

    def kill(self) -> None:
        """End it, with all that it has started."""
        # Its number stays its own until `wait` has seen its end.
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()

    def wait(self, limit_s: float) -> tuple[int | None, str]:
        """Return its exit code and its last line on stderr. The code is None if it took longer than the limit."""
        tail, in_time = self._read(limit_s)
        # It may have closed stderr and go on.
        if not in_time:
            self.kill()
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        return (code if in_time else None), _last_line(tail)

    def _read(self, limit_s: float) -> tuple[bytes, bool]:
        assert self._process.stderr is not None  # noqa: S101 - it is a pipe
        until, tail = time.monotonic() + limit_s, b""
        with self._process.stderr as pipe, selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                if not ready.select(left):
                    continue
                part = os.read(pipe.fileno(), 1 << 16)
                if not part:
                    return tail, True
                tail = (tail + part)[-_TAIL_NBYTES:]
        return tail, False


def _last_line(tail: bytes) -> str:
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return _CONTROLS.sub(" ", lines[-1].removeprefix(_PREFIX))[:_MAX_LINE_CHARS] if lines else ""


def main(arguments: Sequence[str]) -> None:
    """Become the command. It ends if the page is killed.

    Args:
        arguments: The process of the page, the most bytes of a file, and the command.
    """
    parent, most_nbytes, *command = arguments
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        raise SystemExit(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_nbytes), int(most_nbytes)))
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    os.execv(command[0], command)  # noqa: S606 - the page has made the command


if __name__ == "__main__":
    main(sys.argv[1:])
