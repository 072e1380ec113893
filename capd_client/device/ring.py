"""The device ring: capd's own memory on a device, into which tensors are copied when they are captured.

Its layout mirrors the arena's (capd_client.arena.allocator). Small tensors that are captured one after the other are
neighbours in a slab, here and in the arena. One copy can therefore take several of them to the host.
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

# The shares are of the free device memory.
_MAX_NBYTES, _SHARE = 256 << 20, 0.05
# Devices that are sold as 80 GB have a little less.
_LARGE_DEVICE_NBYTES = 75 * 10**9
# On a large device, one output of a large layer takes half a gigabyte. A smaller ring could not hold it.
_MAX_OF_LARGE_NBYTES, _SHARE_OF_LARGE = 1 << 30, 0.02
# The limit for the setting `ring_bytes`, because the job needs memory, too.
_MOST_SHARE = 0.5
_GRANULE_NBYTES = 4096


def ring_nbytes(free_nbytes: int, total_nbytes: int, asked: Optional[int] = None) -> int:
    """Return the size of a device's ring, in whole 4 KiB.

    Args:
        free_nbytes: The bytes that the job could still allocate on the device.
        total_nbytes: All memory of the device.
        asked: The setting `ring_bytes`.

    Returns:
        The setting, but at most half of the free memory. Without a setting, 5 % of the free memory, at most 256 MiB.
            On devices of 75 GB and more, 2 % if that is more, at most 1 GiB. 0 if nothing is free.
    """
    if asked is not None:
        nbytes = min(asked, int(free_nbytes * _MOST_SHARE))
    else:
        nbytes = min(_MAX_NBYTES, int(free_nbytes * _SHARE))
        if total_nbytes >= _LARGE_DEVICE_NBYTES:
            nbytes = max(nbytes, min(_MAX_OF_LARGE_NBYTES, int(free_nbytes * _SHARE_OF_LARGE)))
    return max(0, nbytes) // _GRANULE_NBYTES * _GRANULE_NBYTES


class RingMemory:
    """A flat uint8 tensor on the device, of whole 4 KiB, to which any dtype is written.

    A slot is always written in the memory from which it was taken. If the ring closes in the meantime, it drops its
    own reference. The last writer drops the memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def write(self, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy `tensor`, cast to `dtype`, into the slot, contiguous, with one copy on the current stream."""
        source = tensor.detach()
        # Not every one-byte dtype has a copy kernel.
        if dtype is source.dtype and dtype.itemsize == 1:
            source, dtype = source.view(torch.uint8), torch.uint8
        self.flat(slot[0], source.numel(), dtype).view(source.shape).copy_(source)

    def row(self, start: int) -> torch.Tensor:
        """Return the memory of a statistics row from byte `start` on, a multiple of 8."""
        return self.flat(start, ROW_VALUES, torch.float64)

    def flat(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements from byte `start` on, a multiple of their size."""
        view = self._views.get(dtype)
        if view is None:
            # An inference tensor could not be written outside of inference mode.
            with torch.inference_mode(False):
                view = self._views[dtype] = self.tensor.view(dtype)
        first = start // dtype.itemsize
        return view[first : first + numel]


class Ring:
    """The slots of a RingMemory. Any thread may take and give."""

    def __init__(self, memory: torch.Tensor, max_block_s: float = 0.0) -> None:
        """Divide `memory` into slots.

        Args:
            memory: The memory of the ring: uint8 [bytes] on the device.
            max_block_s: How long a capture may wait for room, see `capd_client.arena.waiting`.
        """
        # None once the ring is closed.
        self._memory: Optional[RingMemory] = RingMemory(memory)
        self._slots = SlotAllocator(0, memory.numel())
        self._lock = threading.RLock()
        # Whether this thread is inside the ring already, interrupted by a signal handler (see `Accounts.inside`).
        # The stubs of RLock lack the method.
        self.inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._waiting = Waiting(self._lock, self._slots, max_block_s)

    @property
    def capacity(self) -> int:
        """The size of the largest tensor that fits, in bytes."""
        return self._slots.capacity

    @property
    def roomy(self) -> bool:
        """Whether at least half of it is free and nobody waits for room, as seen without the lock."""
        return not self._waiting.count and 2 * self._slots.free_nbytes >= self._slots.capacity

    def take(self, nbytes: int, deadline: float) -> Optional[tuple[Slot, RingMemory]]:
        """Return a slot and its memory; None if there is no room until `deadline` (time.monotonic)."""
        slot: Optional[Slot] = None
        try:
            with self._lock:
                if self._memory is None:
                    return None
                slot = self._slots.take(nbytes)
                if slot is None:
                    slot = self._waiting.take(nbytes, deadline - time.monotonic())
                return None if slot is None else (slot, self._memory)
        except BaseException:
            # A signal handler of the job may raise here.
            if slot is not None:
                self.give([slot])
            raise

    def give(self, slots: list[Slot]) -> None:
        """Return slots that nothing reads any more. Each leaves the list, so that it is returned only once."""
        with self._lock:
            while slots:
                # A signal handler runs before these two statements or after them, never in between.
                self._slots.give(slots[-1])
                del slots[-1]
            self._waiting.given()

    def close(self) -> None:
        """Drop the memory and wake every thread that waits for room. No slot is handed out any more."""
        with self._lock:
            self._memory = None
            self._waiting.close()


Room = tuple[Ring, list[Slot]]
"""Slots of a ring that go back to it together."""
