"""Divides the arena into slots: address-ordered first-fit with coalescing, and slabs for small tensors.

The allocator counts offsets and touches no memory. First-fit by address keeps the used part low and warm. It also
survives slots that stay taken for long. A ring would stop at the first of them. Tensors below 64 KiB are packed into
slabs, 64-byte aligned, so that they do not fragment the rest.

The caller holds the queue's lock. If a signal handler raises, each call has done all of its work or nothing. For this
reason, no call makes another call between its first change and its last. The error may keep a slot from its new
owner. `SlotAllocator.keep` then frees this slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Optional

__all__ = [
    "ALIGNMENT",
    "EMPTY",
    "GRANULE_NBYTES",
    "SLAB_NBYTES",
    "SMALL_NBYTES",
    "Extents",
    "Slot",
    "SlotAllocator",
]

GRANULE_NBYTES = 4096
SLAB_NBYTES = 1 << 20
# Tensors below this size share slabs.
SMALL_NBYTES = 64 << 10
ALIGNMENT = 64


class Extents:
    """The free extents of [start, start + nbytes), kept sorted by address and coalesced."""

    __slots__ = ("_sizes", "_starts", "capacity", "free_nbytes")

    def __init__(self, start: int, nbytes: int) -> None:
        self.capacity = nbytes
        self.free_nbytes = nbytes
        self._starts = [start] if nbytes else []
        self._sizes = [nbytes] if nbytes else []

    def take(self, nbytes: int) -> Optional[int]:
        """Take `nbytes` from the lowest free extent that holds them. Return their start, or None if there is none."""
        sizes = self._sizes
        for index, size in enumerate(sizes):
            if size >= nbytes:
                start = self._starts[index]
                if size == nbytes:
                    del self._starts[index], sizes[index]
                else:
                    self._starts[index] = start + nbytes
                    sizes[index] = size - nbytes
                self.free_nbytes -= nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Return an extent and join it with its free neighbours. Raises ValueError if any of it is already free."""
        starts, sizes = self._starts, self._sizes
        index = bisect_left(starts, start)
        joins_left = index > 0 and starts[index - 1] + sizes[index - 1] >= start
        joins_right = index < len(starts) and start + nbytes >= starts[index]
        if (joins_left and starts[index - 1] + sizes[index - 1] > start) or (
            joins_right and start + nbytes > starts[index]
        ):
            raise ValueError(f"extent {start}+{nbytes} is free already")
        if joins_left and joins_right:
            sizes[index - 1] += nbytes + sizes[index]
            del starts[index], sizes[index]
        elif joins_left:
            sizes[index - 1] += nbytes
        elif joins_right:
            starts[index] = start
            sizes[index] += nbytes
        else:
            # A slice assignment, because a signal handler can run after a call of insert.
            starts[index:index] = (start,)
            sizes[index:index] = (nbytes,)
        self.free_nbytes += nbytes

    def occupy(self, start: int, nbytes: int) -> None:
        """Take the `nbytes` at `start`, which must be free."""
        if not nbytes:
            return
        starts, sizes = self._starts, self._sizes
        index = bisect_left(starts, start + 1) - 1
        first, end = starts[index], starts[index] + sizes[index]
        left = [(first, start - first), (start + nbytes, end - start - nbytes)]
        starts[index : index + 1] = [at for at, size in left if size]
        sizes[index : index + 1] = [size for _, size in left if size]
        self.free_nbytes -= nbytes


class _Slab:
    """An extent from which small slots are cut, in the order of their offsets."""

    __slots__ = ("live", "next_offset", "start")

    def __init__(self) -> None:
        self.start = 0
        self.next_offset = 0
        self.live = 0


# A piece of the arena that one capture owns: its offset, its bytes, and the slab they are from (or None).
# It is a bare tuple, because an object with fields costs more than the rest of the allocation.
Slot = tuple[int, int, Optional[_Slab]]

# A capture without bytes needs no memory.
EMPTY: Slot = (0, 0, None)


class SlotAllocator:
    """The slots in [start, start + nbytes); `start` and `nbytes` are multiples of 4 KiB.

    Args:
        start: The offset of the first slot in the arena.
        nbytes: The bytes for all slots.
    """

    __slots__ = ("_current", "_extents", "_slab_nbytes", "_small_nbytes", "capacity", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.capacity = nbytes
        self._extents = Extents(start, nbytes)
        # In a small arena, a slab of full size would take most of it.
        self._slab_nbytes = min(SLAB_NBYTES, nbytes // 16 // GRANULE_NBYTES * GRANULE_NBYTES)
        self._small_nbytes = min(SMALL_NBYTES, self._slab_nbytes)
        self._current: Optional[_Slab] = None

    @property
    def free_nbytes(self) -> int:
        """The bytes outside every slot and slab."""
        return self._extents.free_nbytes

    @property
    def empty(self) -> bool:
        """Whether there are no slots."""
        slab = self._current
        kept = self._slab_nbytes if slab is not None and not slab.live else 0
        return self._extents.free_nbytes + kept == self.capacity

    def take(self, nbytes: int) -> Optional[Slot]:
        """Return a slot of at least `nbytes`; None if there is no room now. 0 bytes need no room."""
        if nbytes == 0:
            return EMPTY
        if nbytes < self._small_nbytes:
            slot = self._take_small(nbytes)
            if slot is not None:
                return slot
        extent = -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES
        start = self._extents.take(extent)
        if start is None:
            slab = self._current
            if slab is not None and not slab.live:
                self._trim(slab)
                start = self._extents.take(extent)
        return None if start is None else (start, extent, None)

    def give(self, slot: Slot) -> None:
        """Take a slot back. Each slot is given back exactly once."""
        offset, extent, slab = slot
        if slab is None:
            if extent:
                self._extents.give(offset, extent)
            return
        if slab.live == 1:
            if slab is not self._current:
                self._extents.give(slab.start, self._slab_nbytes)
            slab.next_offset = 0
        slab.live -= 1

    def keep(self, slots: Sequence[Slot]) -> None:
        """Free everything except these slots. This repairs the state if an error came before the owner had its slot."""
        slabs: dict[int, _Slab] = {}
        extents = Extents(self.start, self.capacity)
        for offset, nbytes, slab in slots:
            if slab is None:
                extents.occupy(offset, nbytes)
                continue
            if slab.start not in slabs:
                slabs[slab.start], slab.live, slab.next_offset = slab, 0, 0
            slab.live += 1
            slab.next_offset = max(slab.next_offset, offset + nbytes - slab.start)
        for start in slabs:
            extents.occupy(start, self._slab_nbytes)
        if self._current is not None and self._current.start not in slabs:
            self._current = None
        self._extents = extents

    def _trim(self, slab: _Slab) -> None:
        """Free the current slab, which is empty."""
        self._extents.give(slab.start, self._slab_nbytes)
        self._current = None

    def _take_small(self, nbytes: int) -> Optional[Slot]:
        extent = -(-nbytes // ALIGNMENT) * ALIGNMENT
        slab = self._current
        if slab is None or slab.next_offset + extent > self._slab_nbytes:
            slab = _Slab()
            start = self._extents.take(self._slab_nbytes)
            if start is None:
                # A free extent may still hold this tensor alone.
                return None
            slab.start = start
            self._current = slab
        offset = slab.start + slab.next_offset
        slab.next_offset += extent
        slab.live += 1
        return offset, extent, slab
