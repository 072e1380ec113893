"""Copies of sampled records in memory that the daemon shares with the process that measures them."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from capd.server.pipeline.jobs import RecordJob
from capd.store.format.dtypes import stored_type
from capd_client.arena.allocator import GRANULE_NBYTES, Slot, SlotAllocator
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Define

__all__ = ["CopyMemory", "RecordCopy"]


class CopyMemory:
    """A piece of memory for copies, of a fixed size. Pages that were never used take none."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // GRANULE_NBYTES * GRANULE_NBYTES
        self.fd = os.memfd_create("capd-lab", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self._lock = threading.Lock()
        self._slots = SlotAllocator(0, self.nbytes)

    def take(self, nbytes: int) -> Slot | None:
        """Return room for a copy; None if there is none now."""
        with self._lock:
            return self._slots.take(nbytes)

    def give(self, slot: Slot) -> None:
        """Take room back."""
        with self._lock:
            self._slots.give(slot)

    def fill(self, slot: Slot, job: RecordJob) -> None:
        """Copy the elements of a job, in C order."""
        shape, stored = job.descriptor.shape, stored_type(job.define.dtype).stored
        if job.descriptor.nbytes:
            place = np.frombuffer(self._map, stored, job.descriptor.nbytes // stored.itemsize, slot[0])
            # numpy releases the interpreter's lock for it.
            np.copyto(place.reshape(shape), job.tensor(stored)[tuple(slice(0, extent) for extent in shape)])

    def close(self) -> None:
        """Give the memory back. No copy may be in use."""
        self._map.close()
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class RecordCopy:
    """The copy of one record.

    Attributes:
        on_settled: Called once, with whether the record is in the store.
        series: The path of the record's series, once it is in the store.
    """

    run_id: str
    client: bytes
    sequence: int
    define: Define
    moment: Moment
    shape: tuple[int, ...]
    nbytes: int
    slot: Slot
    on_settled: Callable[[RecordCopy, bool], None]
    series: str = ""

    def settle(self, *, committed: bool, series: str = "") -> None:
        """Note that the record is committed in a series, or never will be."""
        self.on_settled(replace(self, series=series), committed)
