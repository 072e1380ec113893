"""A job in a process group of its own, ended by this command: gently, then by force, with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from capd.cli.output import note

__all__ = ["GroupJob", "has_variable", "leaving_on_signals", "signals_handled", "signals_put_off"]

END_S = 60.0  # what the job may take to end, torchrun's own grace of 30 s among it
_LOOK_S = 0.05
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)

Handler = Callable[[int, FrameType | None], None]


def has_variable(pid: int, variable: str) -> bool:
    """Whether this process is there and was started with `variable`, "NAME=VALUE", in its environment."""
    with contextlib.suppress(OSError):
        return os.fsencode(variable) in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def leaving_on_signals() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM and SIGHUP end this command as Ctrl-C does: with what it has begun put in order."""
    return signals_handled(dict.fromkeys(_ENDING, _leave))


class GroupJob:
    """A context manager of the main thread, in which the job is started; leaving it ends whatever is left of the job.

    User signals are passed on to the job. Ctrl-C, SIGTERM and SIGHUP end this command, and with it the job; those that
    are ignored (nohup) stay so, in the job, too. mark: an entry "NAME=VALUE" of `environ` that nothing but this job
    has: by it workers are found that have left the group.
    """

    def __init__(self, command: Sequence[str], environ: dict[str, str], *, mark: str) -> None:
        self._command, self._environ, self.mark = command, environ, mark
        self._process: subprocess.Popen[bytes] | None = None
        self._signals = contextlib.ExitStack()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The job's process; only once it was started."""
        assert self._process is not None, "not started"  # noqa: S101 - a mistake of the caller's
        return self._process

    def __enter__(self) -> Self:
        self._signals.enter_context(signals_handled(dict.fromkeys(_FORWARDED, self._pass_on)))
        self._signals.enter_context(leaving_on_signals())
        return self

    def _start(self, stdout: int, stderr: int | None = None) -> None:
        """Starts the command with these descriptors, as of Popen. Raises OSError where it cannot be executed."""
        stdin = (
            subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        )  # no group of the terminal's
        with signals_put_off(
            (signal.SIGINT, *_ENDING)
        ):  # in its middle they would leave a process that nobody ends
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
        """SIGTERM to the job's group, then to what it leaves in groups of its own; SIGKILL to what does not end.

        A job that has ended well by itself is left alone, with whatever it means to leave behind.
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
        finally:  # also where a second Ctrl-C or SIGTERM says not to wait
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self._signal(signal.SIGKILL)
        _send(signal.SIGKILL, self._left())
        self.process.wait()

    def _in_group(self) -> bool:
        """Whether somebody of the job's group is there: a shell may be gone before the training that it runs."""
        return any(_group_of(pid) == self.process.pid for pid in _pids())

    def _left(self) -> Iterator[int]:
        """Processes of the job that are still there."""
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
    """The group of a process; None where it is gone, or waits for nothing but that its exit code is read."""
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


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handles signals by these functions within the block, but for those that are ignored (nohup)."""
    heard = {number: one for number, one in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, one) for number, one in heard.items()}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


@contextlib.contextmanager
def signals_put_off(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Delivers these signals after the block. Of the main thread alone."""
    came: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    try:
        with signals_handled(dict.fromkeys(numbers, remember)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])
