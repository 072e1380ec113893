"""The terminal of a collection run: the job's output, and one line of progress."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time

from capd.cli.output import human_nbytes
from capd.cli.run.collection_daemon import DaemonView
from capd.collect.request import CollectionRequest
from capd.collect.state import TypeState
from capd.drops import lost

__all__ = ["Display", "progress_text"]

# The interval between two lines of progress if stderr is no terminal.
_QUIET_S = 30.0


class Display:
    """The stderr of a collection run, for use by several threads. A closed terminal is not an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tty = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._status = ""
        # The cursor is at the start of a line, where the status may be drawn.
        self._at_start = True
        self._said = time.monotonic()

    def job_output(self, chunk: bytes) -> None:
        """Show output of the job unchanged."""
        with self._lock:
            self._write((b"\r\x1b[K" if self._drawn else b"") + chunk)
            self._at_start = chunk.endswith(b"\n")
            if self._drawn:
                self._write(self._line())

    def progress(self, text: str) -> None:
        """Show the progress: one redrawn line on a terminal, otherwise a new line every 30 s."""
        with self._lock:
            if self._tty:
                before, self._status = self._drawn, text
                if self._at_start:
                    self._write((b"\r\x1b[K" if before else b"") + self._line())
            elif time.monotonic() - self._said >= _QUIET_S:
                self._said = time.monotonic()
                self._write(f"capd: {text}\n".encode())

    def end(self) -> None:
        """Remove the line of progress, because other output follows."""
        with self._lock:
            if self._drawn:
                self._write(b"\r\x1b[K")
            elif not self._at_start:
                self._write(b"\n")
            self._status, self._at_start = "", True

    @property
    def _drawn(self) -> bool:
        return bool(self._status) and self._at_start

    def _line(self) -> bytes:
        return self._status[: max(1, shutil.get_terminal_size().columns - 1)].encode(errors="replace")

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(content)
            sys.stderr.buffer.flush()


def progress_text(
    one: TypeState, request: CollectionRequest, view: DaemonView | None, expected: int | None, seconds: float
) -> str:
    """Return the line of progress for the job of a type. `expected`: the records that the type should reach."""
    wanted = f" of {request.micro_batches:,}" if request.micro_batches else ""
    parts = [
        one.quant_type,
        f"{one.micro_batches:,}{wanted} micro-batches",
        f"{one.records:,}{'' if expected is None else f' of {expected:,}'} records",
    ]
    if view is None:
        parts.append("the daemon does not answer")
    else:
        run = view.run
        parts.append(f"{0.0 if run is None else run.rate_mib_s:.1f} MiB/s")
        parts.append(f"disk left {human_nbytes(max(0, view.daemon.disk_free - view.daemon.keep_free))}")
        parts.append(f"{0 if run is None else sum(lost(run.dropped).values()):,} dropped")
    limit = f" of {request.timeout_s:.0f} s" if request.timeout_s else ""
    return " · ".join([*parts, f"{seconds:.0f} s{limit}"])
