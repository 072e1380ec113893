"""A job in its own process group. This command ends it with all processes that it started: gently, then by force."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from capd.cli.output import note
from capd.cli.signals import leaving_on_signals, signals_handled, signals_put_off

__all__ = ["GroupJob", "has_variable"]

# The time that the job may take to end. It includes torchrun's own grace of 30 s.
END_S = 60.0
_LOOK_S = 0.05
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def has_variable(pid: int, variable: str) -> bool:
    """Return whether this process exists and was started with `variable`, "NAME=VALUE", in its environment."""
    with contextlib.suppress(OSError):
        return os.fsencode(variable) in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


class GroupJob:
    """A context manager of the main thread in which the job is started. Leaving it ends the rest of the job.

    User signals are passed on to the job. Ctrl-C, SIGTERM and SIGHUP end this command, and the job with it. A signal
    that is ignored (nohup) stays ignored, in the job, too.
    """

    def __init__(self, command: Sequence[str], environ: dict[str, str], *, mark: str) -> None:
        """Prepare the job.

        Args:
            command: The job.
            environ: The job's environment.
            mark: An entry "NAME=VALUE" of `environ` that only this job has. It finds workers that left the group.
        """
        self._command, self._environ, self.mark = command, environ, mark
        self._process: subprocess.Popen[bytes] | None = None
        self._signals = contextlib.ExitStack()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The job's process. It exists only after the start."""
        assert self._process is not None, "not started"  # noqa: S101 - a mistake of the caller's
        return self._process

    def __enter__(self) -> Self:
        self._signals.enter_context(signals_handled(dict.fromkeys(_FORWARDED, self._pass_on)))
        self._signals.enter_context(leaving_on_signals())
        return self

    def _start(self, stdout: int, stderr: int | None = None) -> None:
        """Start the command with these descriptors, as Popen takes them. Raises OSError if it cannot be executed."""
        # The job's group is not the terminal's foreground group, so it cannot read from the terminal.
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        # A signal during the start would leave a process that nobody ends.
        with signals_put_off((signal.SIGINT, *_ENDING)):
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=stdin, stdout=stdout, stderr=stderr, process_group=0
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._process is not None:
                self.end()
        finally:
            self._signals.close()

    def end(self) -> None:
        """Send SIGTERM to the job's group and then to its processes in other groups. SIGKILL those that stay.

        A job that has ended well by itself may leave processes, and they are not touched.
        """
        if self.process.poll() == 0:
            return
        try:
            deadline = time.monotonic() + END_S
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            ended = _within(deadline, lambda: self.process.poll() is not None and not self._in_group())
            _send(signal.SIGTERM, self._left())
            if not (ended and _within(deadline, lambda: next(self._left(), None) is None)):
                note(f"the job did not end within {END_S:g} s of SIGTERM and is killed")
        finally:
            # This also runs if a second Ctrl-C or SIGTERM interrupts the wait.
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self._signal(signal.SIGKILL)
        _send(signal.SIGKILL, self._left())
        self.process.wait()

    def _in_group(self) -> bool:
        """Return whether the job's group has a process. A shell may end before the training that it started."""
        return any(_group_of(pid) == self.process.pid for pid in _pids())

    def _left(self) -> Iterator[int]:
        """Yield the processes of the job that still exist."""
        return (pid for pid in _pids() if has_variable(pid, self.mark))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._process is not None:
            self._signal(number)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _group_of(pid: int) -> int | None:
    """Return the group of a process. None if the process is gone or is a zombie."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(group)


def _send(number: signal.Signals, pids: Iterator[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _within(deadline: float, condition: Callable[[], bool]) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
