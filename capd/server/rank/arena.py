"""The arena of a rank as the daemon sees it: shared memory, checked before it is mapped, and mapped read-only.

The memfd must be sealed against shrinking, growing and further sealing. It must have the announced size and consist of
ordinary pages. Then no later act of the rank can turn a read into SIGBUS. (A hole in huge pages is filled from a pool
that may be empty.)

Where the kernel knows FUTURE_WRITE, that seal is required, too. With it nobody can remove pages, so an answer of
`is_written` stays true. The mapping lives as long as anything refers to it (the session, a job's memoryview).
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import stat

from capd.errors import ArenaError
from capd.server.rank.accounting import MAX_COUNT, PageCounters
from capd.server.rank.journal import Journal
from capd.server.rank.written import WrittenPages
from capd_client.protocol.counter_page import (
    COUNTER_DROPS,
    COUNTER_MAGIC,
    COUNTER_OFFERED,
    COUNTER_STEPS,
    DROP_REASONS,
    PAGE_NBYTES,
)
from capd_client.protocol.journal_layout import JOURNAL_START

__all__ = ["MAX_ARENA_NBYTES", "Arena"]

# 16 TiB: above any node's memory, and below the point where offsets could overflow.
MAX_ARENA_NBYTES = 1 << 44
# The protocol's integers have 63 bits.
_MAX_ITERATIONS = 1 << 62
# The module fcntl has the name from Python 3.13 on.
_FUTURE_WRITE = 0x10
_REQUIRED_SEALS = {"SHRINK": fcntl.F_SEAL_SHRINK, "GROW": fcntl.F_SEAL_GROW, "SEAL": fcntl.F_SEAL_SEAL}


class Arena:
    """A read-only mapping of a rank's sealed memfd."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Check and map a memfd of the announced size. The caller closes `fd`.

        Raises:
            ArenaError: `fd` is not a memfd of exactly `nbytes` in ordinary pages; a required seal is missing; or its
                counter page does not begin with the expected word.
        """
        seals = _check(fd, nbytes)
        self.identity = _identity(fd)
        self.nbytes = nbytes
        written = WrittenPages(fd, lasting=bool(seals & _FUTURE_WRITE))
        self.is_written, self.read = written.holds, written.read
        try:
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ArenaError(f"cannot map an arena of {nbytes} bytes: {error}") from error
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE_NBYTES].cast("Q")
        try:
            is_counted = self.is_written(0, PAGE_NBYTES)
        except OSError as error:
            raise ArenaError(
                f"this kernel does not tell which bytes of a memfd were written (SEEK_HOLE: {error.strerror}); "
                "run daemon and ranks outside of this sandbox"
            ) from error
        if not is_counted:
            raise ArenaError("the counter page was never written")
        if self._words[0] != COUNTER_MAGIC:
            raise ArenaError(f"the counter page begins with {self._words[0]:#x}, expected {COUNTER_MAGIC:#x}")

    def slice(self, offset: int, nbytes: int) -> memoryview:
        """Return the read-only bytes of one capture. They keep the mapping alive. The caller has checked the range."""
        return self._bytes[offset : offset + nbytes] if nbytes else memoryview(b"")

    def fills_up(self, offset: int) -> bool:
        """Return whether a slot at `offset` shows that little room is left. Slots are taken from the front."""
        first = min(self._words[JOURNAL_START], self.nbytes)
        return offset > first + (self.nbytes - first) // 4

    def journal(self) -> Journal | None:
        """Return the rank's journal as its counter page describes it; None if there is none or it is impossible."""
        return Journal.of(self._words, self.nbytes, self.read)

    def counters(self) -> PageCounters:
        """Read the rank's counters. The offered captures are read last, so that they include all that were dropped."""
        words = self._words[COUNTER_DROPS : COUNTER_DROPS + len(DROP_REASONS)]
        dropped = {reason: min(word, MAX_COUNT) for reason, word in zip(DROP_REASONS, words, strict=True)}
        return PageCounters(min(self._words[COUNTER_OFFERED], MAX_COUNT), dropped)

    def begun(self) -> int:
        """Return the number of iterations that the rank has begun: 1 + the current one, 0 before the first."""
        return min(self._words[COUNTER_STEPS], _MAX_ITERATIONS)

    def is_same_memory(self, fd: int) -> bool:
        """Return whether `fd` refers to the memory that is already mapped here."""
        return _identity(fd) == self.identity


def _identity(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size


@functools.cache
def _demanded_seals() -> dict[str, int]:
    """Return the required seals by name, with FUTURE_WRITE if the kernel knows it."""
    try:
        fd = os.memfd_create("capd-seals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ArenaError(f"cannot create a memfd: {error}") from error
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE)
    except OSError:
        # Before Linux 5.1, a rank may remove pages after their check.
        return _REQUIRED_SEALS
    finally:
        os.close(fd)
    return _REQUIRED_SEALS | {"FUTURE_WRITE": _FUTURE_WRITE}


def _check(fd: int, nbytes: int) -> int:
    """Check the memfd and return its seals."""
    if not PAGE_NBYTES < nbytes <= MAX_ARENA_NBYTES:
        raise ArenaError(f"an arena of {nbytes} bytes is outside {PAGE_NBYTES + 1} … {MAX_ARENA_NBYTES}")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ArenaError("the arena's descriptor is not a memfd")
    if (page_nbytes := os.fstatvfs(fd).f_bsize) != mmap.PAGESIZE:
        raise ArenaError(f"the arena's memory is in pages of {page_nbytes} bytes, not {mmap.PAGESIZE}")
    if found.st_size != nbytes:
        raise ArenaError(f"the arena has {found.st_size} bytes, {nbytes} were announced")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(f"the arena's descriptor is not a memfd: {error}") from error
    missing = [name for name, seal in _demanded_seals().items() if not seals & seal]
    if missing:
        raise ArenaError(f"the arena is not sealed against {'|'.join(missing)}; seal it before it is sent")
    return seals
