"""Which bytes of a rank's memfd were ever written, so that the daemon's reading never has to make a page.

A read of a hole through a mapping makes the page, on the account of whoever reads. What was written stays: the arena is
sealed against FUTURE_WRITE, with which the kernel punches no hole, and against SHRINK. So what is known is kept.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, bisect_right

from capd.errors import ArenaError

__all__ = ["WrittenPages"]

_MAX_KNOWN = 4096  # ranges; a rank that leaves more holes than that is asked about again


class WrittenPages:
    """Asks the kernel about one memfd.

    Args:
        fd: stays the caller's. It is opened once more: its file offset is the rank's, too.
        lasting: whether what was written can never be a hole again.

    Raises ArenaError when it cannot be opened.
    """

    def __init__(self, fd: int, *, lasting: bool) -> None:
        try:
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"the arena's memory cannot be opened: {error}") from error
        weakref.finalize(self, os.close, self._fd)
        self._lasting = lasting
        # Starts and ends, ascending and apart. Replaced as one: two connections of a rank may ask at once.
        self._known: tuple[list[int], list[int]] = ([], [])

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether all of [offset, offset + nbytes), which lies inside of the memfd, was written."""
        starts, ends = self._known
        at = bisect_right(starts, offset) - 1
        if not nbytes or (at >= 0 and offset + nbytes <= ends[at]):
            return True
        end = os.lseek(self._fd, offset, os.SEEK_HOLE)  # `offset` itself, if that is one
        if self._lasting and end > offset:
            self._learn(offset, end)
        return end >= offset + nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of what lies there, shorter at the end. Holes read as zeros, and no page is made of them."""
        return os.pread(self._fd, nbytes, offset)

    def _learn(self, start: int, end: int) -> None:
        starts, ends = self._known
        if len(starts) >= _MAX_KNOWN:
            starts, ends = [], []
        first, behind = bisect_left(ends, start), bisect_right(starts, end)
        if first < behind:  # these touch it
            start, end = min(start, starts[first]), max(end, ends[behind - 1])
        self._known = (
            [*starts[:first], start, *starts[behind:]],
            [*ends[:first], end, *ends[behind:]],
        )
