"""Who waits for room in a device's ring: nobody, the capturing thread, or, where the ring is ordered, its stream.

In an ordered ring a snapshot takes the place of an older one whose copy to the arena is issued, and the job's stream
waits on the device for that copy. So a host that is ahead of its device neither waits nor drops. A stream waits for its
own captures alone, which it comes after anyway. Another's might be waiting for this one, by way of another rank.
"""

from __future__ import annotations

import time
from typing import Optional

from capd_client.arena.allocator import Slot
from capd_client.device.ring import Ring, RingMemory
from capd_client.device.seam import Device
from capd_client.device.transfers import Transfers

__all__ = ["RingRoom"]

_POLL_S = 0.001


class RingRoom:
    """Room in `ring`, whose snapshots `transfers` bring home. ordered: whether streams wait for it."""

    def __init__(self, device: Device, ring: Ring, transfers: Transfers, *, ordered: bool) -> None:
        self._device = device
        self._ring = ring
        self._transfers = transfers
        self.ordered = ordered
        self._held_back = (0, 0)  # the number of a gate, and the stream that waits for it already
        self._stalled = 0  # the number of a gate that a thread has waited for in vain

    def take(self, nbytes: int, deadline: float) -> Optional[tuple[Slot, RingMemory]]:
        """A slot of `nbytes` and the memory that it is of; None where there is none until `deadline`."""
        taken = self._ring.take(nbytes, 0.0)
        if not self.ordered or nbytes > self._ring.capacity:
            return taken or self._take_landed(nbytes) or self._ring.take(nbytes, deadline)
        slots = [] if taken is None else [taken[0]]
        try:
            while taken is None or self._transfers.gate is not None:
                with self._transfers.lock:
                    if self._transfers.follows(stream := self._device.stream()):
                        if taken is None:
                            taken = self._take_over(nbytes, stream)
                        if taken is not None:
                            slots = [taken[0]]
                            self._hold_back(stream)
                            break
                # Captures of another stream are pending: it may be waiting for this one, so only this thread waits.
                self._ring.give(slots)
                taken = None
                if self._transfers.gate is None:
                    taken = self._take_landed(nbytes) or self._ring.take(nbytes, deadline)
                    if taken is None:
                        break
                    slots = [taken[0]]
                elif (
                    time.monotonic() >= deadline
                    or self._transfers.failed
                    or self._stalled == self._transfers.gates
                ):
                    self._stalled = self._transfers.gates
                    break
                else:
                    time.sleep(_POLL_S)
        except BaseException:  # a signal handler's
            self._ring.give(slots)
            raise
        return taken

    def _hold_back(self, stream: int) -> None:
        """Have the current stream wait for the gate, once."""
        gate, number = self._transfers.gate, self._transfers.gates
        if gate is not None and self._held_back != (number, stream):
            self._device.hold_back(gate.done)
            self._held_back = (number, stream)

    def _take_landed(self, nbytes: int) -> Optional[tuple[Slot, RingMemory]]:
        """The place of snapshots whose copies are done, which a late pump has not seen yet."""
        taken = None
        while taken is None and self._transfers.free_landed():
            taken = self._ring.take(nbytes, 0.0)
        return taken

    def _take_over(self, nbytes: int, stream: int) -> Optional[tuple[Slot, RingMemory]]:
        """The place of snapshots whose copies are issued but not done."""
        self._transfers.issue_all()
        taken = None
        while taken is None and self._transfers.free_oldest(stream):
            taken = self._ring.take(nbytes, 0.0)
        return taken
