"""The job of one type of a collection run: in its own process group, its output on the terminal and in a log file."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from capd.cli.jobs.process_group import GroupJob
from capd.cli.output import note
from capd.cli.run.collection_terminal import Display

__all__ = ["CollectedJob", "last_lines"]

# The time after the job for output of processes that it left running.
_DRAIN_S = 2.0
_LOOK_S = 0.1
_PIPE_NBYTES = 1 << 16
_TAIL_NBYTES = 1 << 16
_LINE_CHARS = 400


class CollectedJob(GroupJob):
    """The job of one type. Leaving the context ends the job and reads the rest of its output.

    The output is read even if the log's disk or the terminal fails, so the job never waits for either.
    """

    def __init__(
        self, command: Sequence[str], environ: dict[str, str], *, mark: str, log: Path, display: Display
    ) -> None:
        super().__init__(command, environ, mark=mark)
        self._log_path, self._display = log, display
        self._log = self._pipe = -1
        self._files = contextlib.ExitStack()
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, name="capd-job-output", daemon=True)

    def start(self) -> None:
        """Start the job.

        Raises:
            OSError: If the command cannot be executed or the log cannot be created.
        """
        self._log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._files.callback(os.close, self._log)
        self._pipe, end = os.pipe()
        self._files.callback(os.close, self._pipe)
        try:
            self._start(end, end)
        finally:
            os.close(end)
        self._reader.start()

    def logged_nbytes(self) -> int:
        """Return the size of the log until now, in bytes."""
        return os.fstat(self._log).st_size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._display.end()
            super().__exit__(kind, error, trace)
        finally:
            if self._reader.ident is not None:
                self._reader.join(_DRAIN_S)
                self._over.set()
                self._reader.join()
            self._files.close()
            self._display.end()

    def _read(self) -> None:
        failed = False
        while not self._over.is_set():
            if not select.select([self._pipe], [], [], _LOOK_S)[0]:
                continue
            chunk = os.read(self._pipe, _PIPE_NBYTES)
            if not chunk:
                return
            self._display.job_output(chunk)
            try:
                if not failed:
                    _write_all(self._log, chunk)
            except OSError as error:
                failed = True
                note(f"the job's log ends here: {error.strerror}")


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def last_lines(log: Path, count: int = 20, *, nbytes: int | None = None) -> list[str]:
    """Return the last `count` lines of a log without control characters, none if it cannot be read.

    Args:
        log: The file.
        count: The number of lines.
        nbytes: The size of the log's beginning to take the lines from. None takes them from the whole log.
    """
    with contextlib.suppress(OSError), log.open("rb") as file:
        end = file.seek(0, os.SEEK_END) if nbytes is None else nbytes
        start = file.seek(max(0, end - _TAIL_NBYTES))
        lines = file.read(end - start).decode(errors="replace").splitlines()[-count:]
        return ["".join(c for c in line if c.isprintable() or c == "\t")[:_LINE_CHARS] for line in lines]
    return []
