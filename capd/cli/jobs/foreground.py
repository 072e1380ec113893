"""The job of `capd run`: found on the path and run in the foreground, with signals passed on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType, TracebackType

import typer

from capd.cli.output import note
from capd.cli.signals import signals_handled, signals_put_off

__all__ = ["ForegroundJob", "find_command"]

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def find_command(name: str) -> str:
    """Return the path of a command as the shell would find it.

    Raises:
        typer.Exit: With a shell's code: 127 if there is no such command, 126 if it cannot be executed.
    """
    found = shutil.which(name)
    if found is not None:
        return found
    looked_at = name if "/" in name else shutil.which(name, mode=os.F_OK)
    if looked_at is not None and os.path.exists(looked_at):
        note(
            f"{name}: not executable (or a directory); nothing was started; chmod +x, or name its interpreter"
        )
        raise typer.Exit(126)
    note(f"{name}: command not found; nothing was started; correct the name, or give its path (./{name})")
    raise typer.Exit(127)


class ForegroundJob:
    """A runner of one command in the foreground, as a context manager of the main thread.

    Inside the context, SIGTERM, SIGHUP and user signals go to the job. SIGINT does so, too, unless the terminal has
    sent it to the job already. Before the job runs, SIGTERM, SIGHUP and SIGINT end this command. After the job they
    change nothing, so that the store is still sealed. A signal that is ignored (nohup) stays ignored, in the job, too.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signals = signals_handled(dict.fromkeys(_HANDLED, self._on_signal))

    def __enter__(self) -> ForegroundJob:
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(None, None, None)

    def run(self, command: Sequence[str], environ: dict[str, str]) -> int:
        """Run the command and wait for it.

        Returns:
            The exit code: 128+N if signal N ended the command, 126 if it cannot be executed after all (no
            interpreter, wrong machine).
        """
        try:
            # A signal between the start and the assignment would end this command and leave the job.
            with signals_put_off(_HANDLED):
                self._process = subprocess.Popen(command, env=environ)
        except OSError as error:
            note(f"{command[0]} cannot be executed: {error.strerror or error}")
            return 126
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._process is None:
            if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                raise SystemExit(128 + number)
        elif self._process.returncode is None and not (number == signal.SIGINT and _in_foreground()):
            self._process.send_signal(number)


def _in_foreground() -> bool:
    """Return whether a terminal sends its Ctrl-C to this process group, and so directly to the job."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)
