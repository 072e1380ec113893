"""Copies the bytes of CPU tensors into the arena.

Tensors without gaps are copied with memmove(3). For a small tensor, a torch view of the slot would cost several times
the copy. Copies up to 64 KiB hold the GIL, because a release for a few microseconds would give it to the client
thread. Large tensors and tensors with gaps use torch's copy.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Optional

import torch

__all__ = ["GIL_HELD_NBYTES", "MEMMOVE_NBYTES", "HostCopy", "move", "move_holding_gil", "order_of"]

GIL_HELD_NBYTES = 64 << 10
# For larger tensors, torch's copy may use several threads.
MEMMOVE_NBYTES = 1 << 20

# Releases the GIL.
move = ctypes.memmove
move_holding_gil = ctypes.PyDLL(None).memmove
# The length is passed as a pointer, which has the same width. ctypes takes three times as long for a size_t.
move_holding_gil.argtypes = [ctypes.c_void_p] * 3
move_holding_gil.restype = None


@lru_cache(maxsize=4096)
def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Optional[tuple[int, ...]]:
    """Return the axes in the order of memory, outermost first. None if the elements have gaps."""
    order = tuple(sorted(range(len(shape)), key=lambda axis: -strides[axis]))
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != expected:
            return None
        expected *= shape[axis]
    return order


class HostCopy:
    """The copies into one arena.

    Args:
        buffer: The writable buffer of the arena.
        address: The address of the buffer.
    """

    def __init__(self, buffer: Any, address: int) -> None:
        self._buffer = buffer
        self._address = address

    def fill(self, source: torch.Tensor, dtype: torch.dtype, offset: int, nbytes: int) -> None:
        """Write the elements of `source`, cast to `dtype`, to `offset`: `nbytes`, contiguous, in C order."""
        plain = source.dtype is dtype and source.is_contiguous() and not source.is_neg()
        if plain and nbytes and (nbytes <= MEMMOVE_NBYTES or torch.get_num_threads() == 1):
            copy = move_holding_gil if nbytes <= GIL_HELD_NBYTES else move
            copy(self._address + offset, source.data_ptr(), nbytes)
        elif nbytes:
            self._copy(source.detach() if source.requires_grad else source, dtype, offset)

    def _copy(self, source: torch.Tensor, dtype: torch.dtype, offset: int) -> None:
        if dtype is source.dtype and dtype.itemsize == 1:
            # Not every one-byte dtype has a copy kernel.
            source, dtype = source.view(torch.uint8), torch.uint8
        target = torch.frombuffer(self._buffer, dtype=dtype, count=source.numel(), offset=offset)
        target.view(source.shape).copy_(source)
