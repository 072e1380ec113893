"""The memory that freed matrices leave in the heap, between allocations that live on."""

from __future__ import annotations

import ctypes

__all__ = ["return_freed"]


def return_freed() -> None:
    """Return it to the system. No effect with another C library than glibc.

    The heap of a command keeps freed buffers, which is faster for many small ones. Matrices of 64 MiB do not fit into
    the holes that others left. Up to 60 MiB of holes come and go from run to run if nothing returns them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
