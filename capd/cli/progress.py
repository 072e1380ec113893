"""A progress line on the terminal. Nothing is drawn if stderr is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Self

from capd.cli.output import human_count, human_nbytes
from capd.cli.redrawn import NO_WRAP, WRAP

__all__ = ["Progress", "StatusLine"]

_CELLS = 12
_INTERVAL_S = 0.1
_FIRST_S = 2.0


class StatusLine:
    """One line that is drawn again from time to time. Leaving the context removes it."""

    def __init__(self, *, drawn: bool | None = None) -> None:
        self._drawn = sys.stderr.isatty() if drawn is None else drawn
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def draw(self, text: str) -> None:
        """Show a text in the line, unless the last one is still new."""
        now = time.monotonic()
        if self._drawn and now >= self._next:
            self._next = now + _INTERVAL_S
            sys.stderr.write(f"\r{NO_WRAP}{text}{WRAP}\x1b[K")
            sys.stderr.flush()

    def say(self, message: str) -> None:
        """Print a message line on stderr, in the place of the drawn line."""
        clear = "\r\x1b[K" if self._drawn else ""
        print(f"{clear}capd: {message}", file=sys.stderr, flush=True)


class Progress(StatusLine):
    """A bar with done and total counts, bytes, rate and time left. `what` names the counted items, such as "files".

    Without a total there are only the count, bytes and rate.
    """

    def __init__(self, total: int | None, what: str, *, drawn: bool | None = None) -> None:
        super().__init__(drawn=drawn)
        self._total, self._what = total, what
        self._done = self._nbytes = 0
        self.began = time.monotonic()

    def add(self, nbytes: int, items: int = 1) -> None:
        """Count one more item, or several."""
        self._done += items
        self._nbytes += nbytes
        self.draw(self.line(time.monotonic()))

    def line(self, now: float) -> str:
        """Return the bar at the time `now` (monotonic)."""
        passed = max(1e-3, now - self.began)
        sizes = f"{self._what}, {human_nbytes(self._nbytes)}, {human_nbytes(self._nbytes / passed)}/s"
        if self._total is None:
            return f"{human_count(self._done)} {sizes}"
        filled = _CELLS * min(self._done, self._total) // max(1, self._total)
        bar = f"[{'#' * filled}{'.' * (_CELLS - filled)}]"
        of = f"{human_count(self._done)} of {human_count(self._total)}"
        return f"{bar} {of} {sizes}{self._left(passed, self._total)}"

    def _left(self, passed: float, total: int) -> str:
        """Return the time left in words, from the mean time of an item so far. It is unknown in the first seconds."""
        if not self._done or passed < _FIRST_S:
            return ""
        seconds = round(passed * max(0, total - self._done) / self._done)
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f", {clock} left"
