"""What copies say: the line of the bytes so far, and the errors of formats that came with the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from capd.cli.output import human_count, human_nbytes
from capd.cli.progress import StatusLine

__all__ = ["copied_line", "errors_said"]


@contextmanager
def copied_line(new: Path, verb: str) -> Iterator[Callable[[int], None]]:
    """Show the bytes that are "copied" or "merged" into `new`. Yield the function that adds to them."""
    from capd.server.heap import settled_heap

    with settled_heap(), StatusLine() as line:
        done = 0

        def progress(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            line.draw(f"{new.name}: {human_nbytes(done)} {verb}")

        yield progress


def errors_said(number: int) -> str:
    """Return the end of a phrase about records, for those that have errors of formats."""
    return f", errors of {human_count(number, 'record')}" if number else ""
