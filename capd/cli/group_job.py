"""A job in a process group of its own, ended by this command: gently, then by force, with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from capd.cli.output import note

__all__ = ["GroupJob", "has_variable"]

END_S = 60.0  # what the job may take to end, torchrun's own grace of 30 s among it
_FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def has_variable(pid: int, variable: str) -> bool:
    """Whether this process is there and was started with `variable`, "NAME=VALUE", in its environment."""
    with contextlib.suppress(OSError):
        return os.fsencode(variable) in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


class GroupJob:
    """A context manager of the main thread; leaving it ends whatever is left of the job.

    SIGHUP and user signals are passed on to the job. Ctrl-C and SIGTERM end this command, and with it the job.
    mark: an entry "NAME=VALUE" of `environ` that nothing but this job has: by it workers are found that have left the
    group. stdout, stderr: descriptors, as of Popen. Raises OSError where the command cannot be executed.
    """

    def __init__(
        self, command: Sequence[str], environ: dict[str, str], *, mark: str, stdout: int, stderr: int | None
    ) -> None:
        self._mark = mark
        self._before: dict[signal.Signals, Any] = {}
        stdin = (
            subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        )  # no group of the terminal's
        self.process = subprocess.Popen(
            command, env=environ, stdin=stdin, stdout=stdout, stderr=stderr, process_group=0
        )

    def __enter__(self) -> Self:
        for number in _FORWARDED:
            self._before[number] = signal.signal(number, self._pass_on)
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        finally:
            for number, before in self._before.items():
                signal.signal(number, before)

    def end(self) -> None:
        """SIGTERM to the job's group; SIGKILL to what does not end, workers in groups of their own among it.

        A job that has ended by itself is left alone, with whatever it means to leave behind.
        """
        process = self.process
        if process.poll() is not None:
            return
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            if process.poll() is None:
                note(f"the job did not end within {END_S:g} s of SIGTERM and is killed")
        finally:  # also where a second Ctrl-C or SIGTERM says not to wait
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self._signal(signal.SIGKILL)
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _left(self) -> Iterator[int]:
        """Processes of the job that are still there."""
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return (pid for pid in pids if has_variable(pid, self._mark))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signal(number)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
