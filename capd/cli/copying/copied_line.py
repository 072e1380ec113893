"""The line that tells how many bytes a copy has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from capd.cli.output import human_nbytes
from capd.cli.progress import StatusLine

__all__ = ["copied_line"]


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
