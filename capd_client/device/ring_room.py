"""The room in a device's ring, and who waits for it: nobody, the capturing thread, or its stream (an ordered ring).

In an ordered ring a snapshot takes the place of an older one whose copy to the arena is issued. The job's stream waits
on the device for that copy. A host that is ahead of its device therefore neither waits nor drops. A stream waits only
for its own captures, which it follows anyway. Captures of another stream could be waiting for this stream, through
another rank.
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
    """The room in one device's ring."""

    def __init__(self, device: Device, ring: Ring, transfers: Transfers, *, ordered: bool) -> None:
        """Watch one ring.

        Args:
            device: The device of the ring.
            ring: The ring.
            transfers: The copies that empty the ring.
            ordered: Whether streams wait for room.
        """
        self._device = device
        self._ring = ring
        self._transfers = transfers
        self.ordered = ordered
        # The number of a gate, and the stream that already waits for it.
        self._held_back = (0, 0)
        # The number of a gate for which a thread has waited in vain.
        self._stalled = 0

    def take(self, nbytes: int, deadline: Optional[float]) -> Optional[tuple[Slot, RingMemory]]:
        """Return a slot of `nbytes` and its memory; None if there is no room until `deadline` (time.monotonic).

        With a deadline of 0 this thread does not wait, but its stream may. Without one, neither waits.
        """
        taken = self._ring.take(nbytes, 0.0)
        if not self.ordered or nbytes > self._ring.capacity:
            return taken or self._take_landed(nbytes) or self._ring.take(nbytes, deadline or 0.0)
        if deadline is None:
            return self._take_free(taken, nbytes)
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
                # Captures of another stream are pending. That stream may be waiting for this one, so only this thread
                # waits.
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
                    # With a deadline of 0, the call has not waited.
                    if deadline:
                        self._stalled = self._transfers.gates
                    break
                else:
                    time.sleep(_POLL_S)
        except BaseException:
            # A signal handler of the job may raise here.
            self._ring.give(slots)
            raise
        return taken

    def _take_free(
        self, taken: Optional[tuple[Slot, RingMemory]], nbytes: int
    ) -> Optional[tuple[Slot, RingMemory]]:
        """Return the slot that was taken, or one whose copy is done, unless a gate is pending.

        A slot behind a gate may still be read by a copy, so its user would have to wait.
        """
        if taken is None and self._transfers.gate is None:
            taken = self._take_landed(nbytes)
        if taken is not None and self._transfers.gate is not None:
            self._ring.give([taken[0]])
            taken = None
        return taken

    def _hold_back(self, stream: int) -> None:
        """Let the current stream wait for the gate, once."""
        gate, number = self._transfers.gate, self._transfers.gates
        if gate is not None and self._held_back != (number, stream):
            self._device.hold_back(gate.done)
            self._held_back = (number, stream)

    def _take_landed(self, nbytes: int) -> Optional[tuple[Slot, RingMemory]]:
        """Take the place of snapshots whose copies are done, although a late pump has not seen it yet."""
        taken = None
        while taken is None and self._transfers.free_landed():
            taken = self._ring.take(nbytes, 0.0)
        return taken

    def _take_over(self, nbytes: int, stream: int) -> Optional[tuple[Slot, RingMemory]]:
        """Take the place of snapshots whose copies are issued but not done."""
        self._transfers.issue_all()
        taken = None
        while taken is None and self._transfers.free_oldest(stream):
            taken = self._ring.take(nbytes, 0.0)
        return taken
