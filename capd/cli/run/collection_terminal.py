"""The terminal of a collection run: the job's output, and a line that says how far it is."""

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

_QUIET_S = 30.0  # between two lines of progress where there is no terminal


class Display:
    """Writes to stderr; for several threads. A terminal that is gone is no error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tty = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._status = ""
        self._at_start = True  # of a line: there the status may be drawn
        self._said = time.monotonic()

    def job_output(self, chunk: bytes) -> None:
        """Shows output of the job, unchanged."""
        with self._lock:
            self._write((b"\r\x1b[K" if self._drawn else b"") + chunk)
            self._at_start = chunk.endswith(b"\n")
            if self._drawn:
                self._write(self._line())

    def progress(self, text: str) -> None:
        """Shows how far the collection is: redrawn on a terminal, else a line now and then."""
        with self._lock:
            if self._tty:
                before, self._status = self._drawn, text
                if self._at_start:
                    self._write((b"\r\x1b[K" if before else b"") + self._line())
            elif time.monotonic() - self._said >= _QUIET_S:
                self._said = time.monotonic()
                self._write(f"capd: {text}\n".encode())

    def end(self) -> None:
        """Take the line of progress away: what comes next is printed by others."""
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
    """The line that says how far the job of a type is.

    Args:
        one: the type.
        request: the collection's.
        view: what the daemon says, None where it does not answer.
        expected: how many records the type should give, None where nobody knows.
        seconds: how long the job has run.
    """
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
