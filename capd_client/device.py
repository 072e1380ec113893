"""Captures of device tensors: snapshot into a device ring now, copy to the arena on a side stream later.

The seam is `Device`: streams, events and copies of one accelerator. `CudaDevice` (capd_client.cuda) is the real
one; tests use one that delays and reorders. Everything above the seam is here and is the same for both.

The training thread issues one device-to-device copy on its current stream and one event, nothing else: the
snapshot removes races with in-place writes, freed storages and the caching allocator. A tensor declared immutable
is held instead, and needs no copy. The client thread waits for the event on the side stream, copies to the arena
piece by piece (capd_client.pieces) and asks about the oldest piece only, so captures become ready in order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol

import torch

from capd_client.allocator import SMALL_NBYTES
from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.devstats import ROW_DTYPES, fill_row
from capd_client.in_flight import Capture
from capd_client.pacing import Pace
from capd_client.pieces import Piece, Snapshot, cut
from capd_client.protocol import Descriptor
from capd_client.ring import Ring
from capd_client.statistics_row import ROW_NBYTES

__all__ = ["AHEAD_NBYTES", "Device", "DeviceStager", "Event"]

# Pieces are issued while less than this is under way, so at most one piece more. A copy engine serves what is queued
# first: whoever else copies waits behind it (96 MiB: 1.8 ms at 55 GB/s), and no longer. Two pieces would last
# 1.2 ms, which a tick of the client thread takes as well; the link would stand still between them.
AHEAD_NBYTES = 64 << 20

Event = Any  # the device's own kind


class Device(Protocol):
    """Streams, events and copies of one accelerator. No method waits for the device, `fetch` apart."""

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether this part of the arena is page-locked. Until it is, `fetch` to it waits for its copy."""

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream."""

    def allocate_ring(self) -> torch.Tensor:
        """The ring: uint8, one dimension, on the device, sized by `ring_nbytes`; empty if there is no room."""

    def record(self) -> Event:
        """An event behind everything issued so far on the current stream of this thread."""

    def enter_thread(self) -> None:
        """Called once by the client thread before its first use of the device."""

    def fetch(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Event]) -> None:
        """Copy device bytes to host bytes on the side stream, behind `after`. Waits only if host is unpinned."""

    def fetched(self) -> Event:
        """An event behind everything issued so far on the side stream."""

    def query(self, event: Event) -> bool:
        """Whether the event has happened. Does not wait."""

    def recycle(self, event: Event) -> None:
        """Give an event that has happened back for reuse."""


class DeviceStager:
    """Takes captures on training threads (`snapshot`, `hold`) and brings them home on the client thread (`advance`).

    buffer: the arena's bytes. pace: limits the bytes per second, shared by the stagers of a rank. max_block_s: how
    long a capture may wait for room (0: never). has_kernel: whether there is a fast kernel for a dtype's statistics.
    wake: tells the client thread that there is something to do.
    """

    def __init__(
        self,
        device: Device,
        books: Books,
        buffer: Any,
        *,
        pace: Pace,
        max_block_s: float = 0.0,
        has_kernel: Callable[[torch.dtype], bool] = lambda dtype: False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = device
        self._books = books
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            self._host = torch.frombuffer(buffer, dtype=torch.uint8)
            self._ring = Ring(device.allocate_ring(), max_block_s)
        self.inside = self._ring.inside  # see there
        self._pace = pace
        self._max_block_s = max_block_s
        self._has_kernel = has_kernel
        self._wake = wake
        self._handing = threading.RLock()  # a signal handler may capture, too
        self._handed: deque[Snapshot] = deque()  # by training threads
        self._due: deque[Snapshot] = deque()  # taken over by the client thread, which owns what follows
        self._issued = 0  # bytes of the first due one that are under way
        self._under_way: deque[Piece] = deque()
        self._ahead = 0  # bytes under way
        self._entered = False
        self.failed = False

    @property
    def capacity(self) -> int:
        """Largest tensor that the ring holds, in bytes."""
        return self._ring.capacity

    @property
    def pending(self) -> bool:
        """Whether copies are under way or due."""
        return bool(self._handed or self._due or self._under_way)

    @property
    def pressed(self) -> bool:
        """Whether more copies are due than may be under way, or the ring is filling up: `advance` again soon.

        Not while the pace holds them back: it lets what a later look is late by be made up.
        """
        return not self.failed and self._pace.due() and (bool(self._due) or not self._ring.roomy)

    def deadline(self) -> float:
        """Until when (time.monotonic) a capture that begins now may wait for room."""
        return time.monotonic() + self._max_block_s

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream: then nothing may be issued."""
        return self._device.is_capturing()

    def row_place(self, dtype: torch.dtype, nbytes: int, payload: bool) -> Optional[int]:
        """Where in its slot a capture of `nbytes` gets its statistics row; None where the daemon computes it.

        Without payload that is at the slot's begin. Behind a payload only where both fit into a slot and it costs the
        device next to nothing; for small tensors the launch would cost the training thread more than the daemon saves.
        """
        if dtype not in ROW_DTYPES or not nbytes:
            return None
        if not payload:
            return 0
        place = -(-nbytes // 8) * 8  # as the protocol aligns rows
        fits = place + ROW_NBYTES <= min(self.capacity, self._books.slots.capacity)
        return place if fits and nbytes >= SMALL_NBYTES and self._has_kernel(dtype) else None

    # -- training threads -------------------------------------------------------------------------------

    def snapshot(
        self,
        tensor: torch.Tensor,
        capture: Capture,
        dtype: torch.dtype,
        deadline: float,
        row_at: Optional[int] = None,
    ) -> Optional[DropReason]:
        """Copy `tensor`, cast to `dtype`, into the ring on the current stream; a reason if that cannot be.

        row_at: as `row_place` has it; the row travels with the bytes, or alone where there are none. Waits for room
        until `deadline`; a signal handler is refused `inside` the ring. The capture becomes ready by `advance`.
        """
        if self.inside():
            return DropReason.INTERNAL
        nbytes = capture.descriptor.nbytes if row_at is None else row_at + ROW_NBYTES
        taken = self._ring.take(nbytes, deadline)
        if taken is None:
            return self._books.refusing or (DropReason.INTERNAL if self.failed else DropReason.RING_FULL)
        slot, memory = taken
        try:
            if capture.descriptor.nbytes:
                tensor = memory.write(slot, tensor, dtype)
            if row_at is not None:
                self._add_row(tensor, capture.descriptor, dtype, memory.row(slot[0] + row_at), row_at)
            return self._hand_over(Snapshot(capture, memory.tensor, nbytes, self._device.record(), slot))
        except BaseException:
            if (
                capture.thread
            ):  # not handed over; what was issued may write to the slot until the device is there
                self._books.abort(capture, DropReason.INTERNAL)
                self._hand_over(Snapshot(capture, memory.tensor, 0, self._device.record(), slot))
            raise

    def _add_row(
        self, tensor: torch.Tensor, descriptor: Descriptor, dtype: torch.dtype, row: torch.Tensor, row_at: int
    ) -> None:
        """Compute the statistics on the current stream. An error costs the row alone where the payload travels."""
        try:
            fill_row(tensor, row, dtype)
        except Exception:
            if not descriptor.payload:
                raise
        else:
            descriptor.row_offset = descriptor.offset + row_at

    def hold(self, tensor: torch.Tensor, capture: Capture) -> Optional[DropReason]:
        """Keep `tensor`, for which `can_hold` is true, until its bytes are copied; no room in the ring is needed."""
        with torch.inference_mode(False):  # there the view would have no version counter
            memory = tensor.detach().reshape(-1).view(torch.uint8)
        return self._hand_over(Snapshot(capture, memory, capture.descriptor.nbytes, self._device.record()))

    @staticmethod
    def can_hold(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the tensor's memory is what is to be kept, and a change of it could be noticed.

        Small ones are not worth a copy of their own: in the ring they share one.
        """
        return (
            tensor.dtype is dtype
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_inference()  # these have no version counter
            and tensor.nbytes >= SMALL_NBYTES
        )

    def _hand_over(self, snapshot: Snapshot) -> Optional[DropReason]:
        with self._handing:
            if self.failed:  # what is handed over now nobody would take
                return DropReason.INTERNAL
            self._handed += (snapshot,)  # not append, behind which a signal handler may run
            snapshot.capture.thread = 0
        self._wake()
        return None

    # -- the client thread ------------------------------------------------------------------------------

    def advance(self) -> int:
        """Finish the copies that are done, issue those that are due; returns how many captures became ready."""
        if not self._entered:
            self._device.enter_thread()
            self._entered = True
        finished = 0
        while self._under_way and self._device.query(self._under_way[0].done):
            finished += self._finish(self._under_way[0])
            self._under_way.popleft()  # behind it: what an error leaves unfinished `fail` finds there
        while self._handed:
            self._due.append(self._handed.popleft())
        while self._due and self._ahead < AHEAD_NBYTES and self._pace.due():
            if not self._issue(cut(self._due, self._issued)):
                break
        return finished

    def fail(self) -> None:
        """After a device error: drop everything under way and every later capture as internal errors, once each.

        Where copies may still be under way the slots are given to nobody else. The ring's memory goes back.
        """
        with self._handing:
            self.failed = True
            self._due.extend(self._handed)
            self._handed.clear()
        for piece in self._under_way:
            for snapshot in piece.ends:
                self._books.abandon(snapshot.capture, DropReason.INTERNAL)
        if self._issued:
            self._books.abandon(self._due.popleft().capture, DropReason.INTERNAL)
        for snapshot in self._due:
            self._books.abort(snapshot.capture, DropReason.INTERNAL)
        self._under_way.clear()
        self._due.clear()
        self._ring.close()

    def stop(self) -> None:
        """At the end of the session: whoever waits for room need not wait any longer."""
        self._ring.close()

    def _issue(self, piece: Piece) -> bool:
        """Start one copy. False if it was not started, or was waited for: then it is others' turn.

        An unpinned copy is not begun before its tensor is there: otherwise this thread, and with it the
        acknowledgements of every device, would wait for all that the training thread has queued in front of it.
        """
        nbytes = piece.nbytes
        host = self._host[piece.offset : piece.offset + nbytes]
        pinned = self._device.is_pinned(host)
        if not pinned and not all(self._device.query(event) for event in piece.after):
            return False
        self._under_way.append(piece)  # first, so that an error below leaves its slots to nobody else
        self._issued = 0 if piece.ends else self._issued + nbytes
        for _ in piece.ends:
            self._due.popleft()
        self._device.fetch(piece.source, host, piece.after)
        piece.done = self._device.fetched()
        self._pace.spend(nbytes)
        self._ahead += nbytes
        return pinned

    def _finish(self, piece: Piece) -> int:
        self._ahead -= piece.nbytes
        self._device.recycle(piece.done)
        for snapshot in piece.ends:
            if snapshot.intact:
                self._books.ready(snapshot.capture)
            else:
                self._books.abort(snapshot.capture, DropReason.MUTATED)
            self._device.recycle(snapshot.ready)
        self._ring.give([snapshot.slot for snapshot in piece.ends if snapshot.slot is not None])
        return len(piece.ends)
