"""The seam to one accelerator: its streams, events and copies, as capd uses them.

`capd_client.device.cuda.device.CudaDevice` is the real one. Tests use one that delays and reorders. The device model
of the benchmarks uses one with its own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from capd_client.arena.allocator import Slot
from capd_client.device.pieces import Piece
from capd_client.device.ring import RingMemory

__all__ = ["Device", "Event"]

# The device's own kind of event.
Event = Any


class Device(Protocol):
    """An accelerator. Only `wait` waits for the device, and `fetch` to memory that is not page-locked."""

    def part_end(self, offset: int) -> int:
        """Return the end of the page-locked part that holds `offset` of the arena; 0 if it is not locked."""

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured on the calling thread's current stream of this device."""

    def allocate_ring(self) -> torch.Tensor:
        """Return the ring: uint8 [bytes] on the device, sized by `ring_nbytes`; empty if there is no room."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return further memory: uint8 [nbytes] on the device; empty if there is no room."""

    def stream(self) -> int:
        """Return the number of the calling thread's current stream of this device."""

    def copy(self, memory: RingMemory, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy a tensor, cast to `dtype`, to a slot of the ring, on the calling thread's current stream."""

    def record(self) -> Event:
        """Return an event after everything issued so far on the calling thread's current stream."""

    def hold_back(self, event: Event) -> None:
        """Let the calling thread's current stream wait for `event`. The thread itself does not wait."""

    def enter_thread(self) -> None:
        """Prepare the copy pump's thread. The thread calls it once before its first use of the device."""

    def compute(self, segments: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]) -> None:
        """Write the statistics rows of flat tensors on the side stream, after the events `after`. For the pump."""

    def fetch(self, piece: Piece, arena: torch.Tensor) -> None:
        """Copy a piece to its place in the arena, uint8 [bytes], on the side stream.

        The call waits only if this place is not pinned.
        """

    def fetched(self) -> Event:
        """Return an event after everything issued so far on the side stream."""

    def can_issue(self) -> bool:
        """Return whether a training thread may now call `fetch` to pinned memory."""

    def query(self, event: Event) -> bool:
        """Return whether the event has happened, if this thread may ask; otherwise False. Does not wait."""

    def wait(self, event: Event) -> None:
        """Return when an event of `fetched` has happened, or a while before. Other threads run in the meantime."""

    def recycle(self, event: Event) -> None:
        """Give back an event that has happened, for reuse."""
