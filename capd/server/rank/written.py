"""The written bytes of a rank's memfd, so that the daemon's reads never create a page.

Reading a hole through a mapping creates the page and charges it to the reader. Written bytes stay written: the arena
is sealed against SHRINK and FUTURE_WRITE, and with the latter the kernel punches no hole. Known ranges are therefore
kept.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, bisect_right

from capd.errors import ArenaError

__all__ = ["WrittenPages"]

# Ranges. If a rank leaves more holes, the kernel is asked again.
_MAX_KNOWN = 4096


class WrittenPages:
    """The written ranges of one memfd, as the kernel reports them."""

    def __init__(self, fd: int, *, lasting: bool) -> None:
        """Open the memfd a second time, because its file offset is shared with the rank. The caller closes `fd`.

        If the pages are `lasting`, written bytes can never become a hole again.

        Raises:
            ArenaError: The memfd cannot be opened.
        """
        try:
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"the arena's memory cannot be opened: {error}") from error
        weakref.finalize(self, os.close, self._fd)
        self._lasting = lasting
        # Starts and ends of ranges that ascend and do not touch. One assignment replaces both lists, because two
        # connections of a rank may ask at the same time.
        self._known: tuple[list[int], list[int]] = ([], [])

    def holds(self, offset: int, nbytes: int) -> bool:
        """Return whether all of [offset, offset + nbytes) was written. The range must be inside the memfd."""
        starts, ends = self._known
        at = bisect_right(starts, offset) - 1
        if not nbytes or (at >= 0 and offset + nbytes <= ends[at]):
            return True
        # This is `offset` itself if a hole is there.
        end = os.lseek(self._fd, offset, os.SEEK_HOLE)
        if self._lasting and end > offset:
            self._learn(offset, end)
        return end >= offset + nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of the bytes, shorter at the end. Holes read as zeros, and no page is created for them."""
        return os.pread(self._fd, nbytes, offset)

    def _learn(self, start: int, end: int) -> None:
        starts, ends = self._known
        if len(starts) >= _MAX_KNOWN:
            starts, ends = [], []
        first, behind = bisect_left(ends, start), bisect_right(starts, end)
        if first < behind:
            # Some known ranges touch the new one.
            start, end = min(start, starts[first]), max(end, ends[behind - 1])
        self._known = (
            [*starts[:first], start, *starts[behind:]],
            [*ends[:first], end, *ends[behind:]],
        )
