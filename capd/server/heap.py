"""How the heap of the daemon, of an export or an import behaves: freed buffers are kept for the next ones, garbage is
looked for rarely."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

__all__ = ["settle_heap", "settled_heap"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BUFFER_NBYTES = 32 << 20  # above it, allocations are mapped and unmapped alone; the most that glibc accepts
_KEPT_NBYTES = 64 << 20  # free memory at the end of a heap before it is given back
_YOUNG_OBJECTS = 50_000  # more than live at once between the arena and the disk


def settle_heap() -> None:
    """Call once, when everything is imported.

    Records and their parts refer to each other in no cycles: reference counts free them, and Python's default of
    looking through the youngest 700 objects again and again costs a seventh of what a small record takes.
    """
    _keep_freed_buffers()
    gc.freeze()  # what is imported by now never becomes garbage
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """As `settle_heap`, for work that a process does for a while: afterwards garbage is looked for as before."""
    before = gc.get_threshold()
    settle_heap()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _keep_freed_buffers() -> None:
    """Let glibc serve buffers of a few MiB from its heaps; without effect where the C library is another one.

    By default every chunk's buffers are mapped, faulted in page by page and unmapped again, which costs a
    daemon that handles megabytes at a time a quarter of its CPU time.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _BUFFER_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
