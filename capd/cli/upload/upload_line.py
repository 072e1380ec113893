"""The bar of an upload on the terminal: bytes that went up, of those that wait, with their rate and the time left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from capd.cli.output import human_nbytes
from capd.cli.progress import StatusLine

if TYPE_CHECKING:
    from capd.store.upload.sending.figures import UploadFigures

__all__ = ["bar_text", "upload_line"]

_CELLS = 12
_INTERVAL_S = 0.2
_FIRST_S = 2.0


@contextlib.contextmanager
def upload_line(name: str, figures: UploadFigures) -> Iterator[StatusLine]:
    """Draw the figures of an upload for some statements."""
    began, done = time.monotonic(), threading.Event()
    first = figures.read().nbytes

    def draw(line: StatusLine) -> None:
        while not done.wait(_INTERVAL_S):
            found = figures.read()
            line.draw(
                f"{name}: {bar_text(found.nbytes - first, found.backlog_nbytes, time.monotonic() - began)}"
            )

    with StatusLine() as line:
        thread = threading.Thread(target=draw, args=(line,), name="capd-upload-line", daemon=True)
        thread.start()
        try:
            yield line
        finally:
            done.set()
            thread.join()


def bar_text(done: int, waiting: int, passed_s: float) -> str:
    """Return the bar with bytes done and in total, their rate, and the time left after the first seconds."""
    total = done + waiting
    filled = _CELLS * done // max(1, total)
    rate = done / max(1e-3, passed_s)
    left = ""
    if done and passed_s >= _FIRST_S:
        minutes, seconds = divmod(round(waiting / max(1.0, rate)), 60)
        hours, minutes = divmod(minutes, 60)
        left = f", {hours}:{minutes:02}:{seconds:02} left" if hours else f", {minutes}:{seconds:02} left"
    return (
        f"[{'#' * filled}{'.' * (_CELLS - filled)}] {human_nbytes(done)} of {human_nbytes(total)}, "
        f"{human_nbytes(rate)}/s{left}"
    )
