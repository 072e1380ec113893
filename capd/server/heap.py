"""The heap of the daemon, of an export and of an import: freed buffers are kept, garbage is collected rarely."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

__all__ = ["settle_heap", "settled_heap"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Larger allocations are mapped and unmapped one by one. This is the most that glibc accepts.
_BUFFER_NBYTES = 32 << 20
# Free memory at the end of a heap before it returns to the system.
_KEPT_NBYTES = 64 << 20
# More objects than live at once between the arena and the disk.
_YOUNG_OBJECTS = 50_000


def settle_heap() -> None:
    """Set up the heap of this process. Call it once, when everything is imported.

    Records and their parts refer to each other without cycles, so reference counts free them. Python's default is to
    search the youngest 700 objects again and again. This search costs a seventh of the time of a small record.
    """
    _keep_freed_buffers()
    # The objects that exist by now never become garbage.
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """Do the same as `settle_heap` for a while. At the end the garbage collector is set as before."""
    before = gc.get_threshold()
    settle_heap()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _keep_freed_buffers() -> None:
    """Let glibc serve buffers of a few MiB from its heaps. No effect with another C library.

    By default the buffers of every chunk are mapped, faulted in page by page and unmapped again. In a daemon that
    handles megabytes at a time, this costs a quarter of its CPU time.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _BUFFER_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
