"""A progress bar on the terminal: done and total counts, bytes and rate. Nothing is drawn if stderr is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from capd.cli.output import human_count, human_nbytes

__all__ = ["Progress", "progress_bar"]

_CELLS = 24
_INTERVAL_S = 0.1


class Progress:
    """A counter that draws its bar from time to time. `what` names the counted items, such as "files"."""

    def __init__(self, total: int, what: str, *, drawn: bool) -> None:
        self._total, self._what, self._drawn = total, what, drawn
        self._done = self._nbytes = 0
        self.began = time.monotonic()
        self._next = 0.0

    def add(self, nbytes: int) -> None:
        """Count one more item."""
        self._done += 1
        self._nbytes += nbytes
        now = time.monotonic()
        if self._drawn and now >= self._next:
            self._next = now + _INTERVAL_S
            sys.stderr.write(f"\r{self.line(now)}\x1b[K")
            sys.stderr.flush()

    def line(self, now: float) -> str:
        """Return the bar at the time `now` (monotonic)."""
        filled = _CELLS * self._done // max(1, self._total)
        rate = self._nbytes / max(1e-3, now - self.began)
        return (
            f"[{'#' * filled}{'.' * (_CELLS - filled)}] {human_count(self._done)} of {human_count(self._total)} "
            f"{self._what}, {human_nbytes(self._nbytes)}, {human_nbytes(rate)}/s"
        )

    def say(self, message: str) -> None:
        """Print a message line on stderr, in the place of the bar."""
        clear = "\r\x1b[K" if self._drawn else ""
        print(f"{clear}capd: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(total: int, what: str) -> Iterator[Progress]:
    """Show a bar until the end of the block, and then remove it."""
    progress = Progress(total, what, drawn=sys.stderr.isatty())
    try:
        yield progress
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
