"""The seam to one accelerator: its streams, events and copies, as capd uses them.

`capd_client.device.cuda.runtime.CudaDevice` is the real one. Tests use one that delays and reorders, and the device
model of the benchmarks one that keeps its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from capd_client.arena.allocator import Slot
from capd_client.device.pieces import Piece
from capd_client.device.ring import RingMemory

__all__ = ["Device", "Event"]

Event = Any  # the device's own kind


class Device(Protocol):
    """One accelerator. No method waits for the device but `wait`, and `fetch` to memory that is not page-locked."""

    def part_end(self, offset: int) -> int:
        """Where the page-locked part ends that `offset` of the arena is in; 0 where that is not locked."""

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the calling thread's current stream of this device."""

    def allocate_ring(self) -> torch.Tensor:
        """The ring: uint8 [bytes] on the device, sized by `ring_nbytes`; empty if there is no room."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Further memory, uint8 [nbytes] on the device; empty if there is no room."""

    def stream(self) -> int:
        """Number of the calling thread's current stream of this device."""

    def copy(self, memory: RingMemory, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy a tensor, cast to `dtype`, to a slot of the ring, on the calling thread's current stream."""

    def record(self) -> Event:
        """An event after everything issued so far on the calling thread's current stream."""

    def hold_back(self, event: Event) -> None:
        """Have the calling thread's current stream wait for `event`; the thread itself goes on."""

    def enter_thread(self) -> None:
        """Called once by the copy pump's thread before its first use of the device."""

    def compute(self, segments: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]) -> None:
        """Write the statistics rows of flat tensors on the side stream, after `after`. The pump's alone."""

    def fetch(self, piece: Piece, arena: torch.Tensor) -> None:
        """Copy a piece to its place in the arena, uint8 [bytes], on the side stream.

        Waits only if that place is not pinned.
        """

    def fetched(self) -> Event:
        """An event after everything issued so far on the side stream."""

    def can_issue(self) -> bool:
        """Whether a training thread may call `fetch` now, to memory that is pinned."""

    def query(self, event: Event) -> bool:
        """Whether the event has happened, as far as this thread may ask. Does not wait."""

    def wait(self, event: Event) -> None:
        """Return once an event of `fetched` has happened, or a while before. Other threads run meanwhile."""

    def recycle(self, event: Event) -> None:
        """Give an event that has happened back for reuse."""
