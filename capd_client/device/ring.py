"""The device ring: memory of capd's own on a device, which tensors are copied into when they are captured.

Its layout mirrors the arena's (capd_client.arena.allocator): small tensors that are captured one after the other are
neighbours in a slab here as there, so that one copy can bring several of them home.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Optional

import torch

from capd_client.arena.allocator import Slot, SlotAllocator
from capd_client.arena.waiting import Waiting
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = ["Ring", "RingMemory", "Room", "ring_nbytes"]

_MAX_NBYTES, _SHARE = 256 << 20, 0.05  # of the free device memory
_LARGE_DEVICE_NBYTES = 75 * 10**9  # what is sold as 80 GB has a little less
# There one output of a large layer takes half a gigabyte: a smaller ring could not hold it.
_MAX_OF_LARGE_NBYTES, _SHARE_OF_LARGE = 1 << 30, 0.02
_MOST_SHARE = 0.5  # what is asked for may not take the job's own memory
_GRANULE_NBYTES = 4096


def ring_nbytes(free_nbytes: int, total_nbytes: int, asked: Optional[int] = None) -> int:
    """The size of a device's ring, in whole 4 KiB.

    Args:
        free_nbytes: What the job could still allocate on the device.
        total_nbytes: All memory of the device.
        asked: The setting `ring_bytes`.

    Returns:
        What is asked for, and at most half of what is free. Else 5 % of what is free, at most 256 MiB; on devices of
        75 GB and more 2 % where that is more, at most 1 GiB. 0 where nothing is free.
    """
    if asked is not None:
        nbytes = min(asked, int(free_nbytes * _MOST_SHARE))
    else:
        nbytes = min(_MAX_NBYTES, int(free_nbytes * _SHARE))
        if total_nbytes >= _LARGE_DEVICE_NBYTES:
            nbytes = max(nbytes, min(_MAX_OF_LARGE_NBYTES, int(free_nbytes * _SHARE_OF_LARGE)))
    return max(0, nbytes) // _GRANULE_NBYTES * _GRANULE_NBYTES


class RingMemory:
    """A flat uint8 tensor on the device, of whole 4 KiB, in which any dtype is written.

    A slot is written in the memory that it was taken from: a ring that closes meanwhile lets go of its reference, the
    last writer of the memory itself.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def write(self, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy `tensor`, cast to `dtype`, into the slot: one copy on the current stream, contiguous whatever it was."""
        source = tensor.detach()
        if dtype is source.dtype and dtype.itemsize == 1:  # not every one-byte dtype has a copy kernel
            source, dtype = source.view(torch.uint8), torch.uint8
        self.flat(slot[0], source.numel(), dtype).view(source.shape).copy_(source)

    def row(self, start: int) -> torch.Tensor:
        """Room for a statistics row from byte `start` on, a multiple of 8."""
        return self.flat(start, ROW_VALUES, torch.float64)

    def flat(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements from byte `start` on, a multiple of their size."""
        view = self._views.get(dtype)
        if view is None:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
                view = self._views[dtype] = self.tensor.view(dtype)
        first = start // dtype.itemsize
        return view[first : first + numel]


class Ring:
    """Slots of a RingMemory. Any thread may take and give.

    max_block_s: how long a capture may wait for room, see `capd_client.arena.waiting`.
    """

    def __init__(self, memory: torch.Tensor, max_block_s: float = 0.0) -> None:
        self._memory: Optional[RingMemory] = RingMemory(memory)  # None once closed
        self._slots = SlotAllocator(0, memory.numel())
        self._lock = threading.RLock()
        # Whether this thread is inside the ring already, interrupted by a signal handler: see `Queue.inside`.
        self.inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # not in its stubs
        self._waiting = Waiting(self._lock, self._slots, max_block_s)

    @property
    def capacity(self) -> int:
        """Largest tensor that it holds, in bytes."""
        return self._slots.capacity

    @property
    def roomy(self) -> bool:
        """Whether at least half of it is free and nobody waits for room. A look without the lock."""
        return not self._waiting.count and 2 * self._slots.free_nbytes >= self._slots.capacity

    def take(self, nbytes: int, deadline: float) -> Optional[tuple[Slot, RingMemory]]:
        """A slot and the memory that it is of, or None where there is none until `deadline` (time.monotonic)."""
        slot: Optional[Slot] = None
        try:
            with self._lock:
                if self._memory is None:
                    return None
                slot = self._slots.take(nbytes)
                if slot is None:
                    slot = self._waiting.take(nbytes, deadline - time.monotonic())
                return None if slot is None else (slot, self._memory)
        except BaseException:  # a signal handler's
            if slot is not None:
                self.give([slot])
            raise

    def give(self, slots: list[Slot]) -> None:
        """Return slots when nothing reads them any more, and take them off the list: so they are given once."""
        with self._lock:
            while slots:
                self._slots.give(slots[-1])
                del slots[-1]  # a signal handler runs before the two or after them, never in between
            self._waiting.given()

    def close(self) -> None:
        """Let go of the memory, and of whoever waits for room in it; nothing is handed out any more."""
        with self._lock:
            self._memory = None
            self._waiting.close()


Room = tuple[Ring, list[Slot]]
"""Slots of a ring that go back to it together."""
