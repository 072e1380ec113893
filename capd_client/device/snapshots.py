"""Captures of device tensors on the training thread: a snapshot into the device ring, or the tensor itself is held.

The training thread issues one device-to-device copy on its current stream and one event: the snapshot removes races
with in-place writes, freed storages and the caching allocator. A tensor declared immutable is held instead, and needs
no copy; so is one that autograd keeps, where that is asked for (capd_client.device.holding). The copies to the arena
are those of capd_client.device.transfers, in the order of the captures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from capd_client.arena.allocator import SMALL_NBYTES, Slot
from capd_client.device.holding import Holding
from capd_client.device.pacing import Pace
from capd_client.device.pieces import Snapshot
from capd_client.device.pump import Pump
from capd_client.device.ring import Ring, RingMemory, Room
from capd_client.device.ring_room import RingRoom
from capd_client.device.seam import Device
from capd_client.device.transfers import Transfers
from capd_client.devstats import fill_row
from capd_client.inflight.accounts import reason_of
from capd_client.inflight.capture import Capture
from capd_client.inflight.queue import Queue
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = ["DeviceStager"]

# Room for statistics rows, apart from the ring: they are neighbours there as in the arena.
_ROWS_NBYTES = 1 << 20


def _unsaid(_error: Exception) -> None:
    pass


class DeviceStager:
    """Takes captures of one device on training threads.

    buffer: the arena's bytes. pace: limits the bytes per second, shared by the stagers of a rank. max_block_s: how
    long a capture may wait for room (0: never). ordered: whether the device waits for room in the ring in its place.
    holding: which tensors are held instead of copied, besides those declared immutable. piece_nbytes: of one copy to
    the arena, None: as is best. on_failure: told of an error of the device, after which nothing of it is captured.
    """

    def __init__(
        self,
        device: Device,
        queue: Queue,
        buffer: Any,
        *,
        pace: Pace,
        max_block_s: float = 0.0,
        ordered: bool = False,
        holding: Optional[Holding] = None,
        piece_nbytes: Optional[int] = None,
        on_failure: Callable[[Exception], None] = _unsaid,
    ) -> None:
        self._device = device
        self._queue = queue
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            self._ring = Ring(device.allocate_ring(), max_block_s)
            self._rows = Ring(device.allocate(_ROWS_NBYTES), max_block_s)
        self.holding = Holding(0) if holding is None else holding
        self.transfers = Transfers(device, queue, host, pace, self.holding, piece_nbytes)
        self._room = RingRoom(device, self._ring, self.transfers, ordered=ordered)
        self._pump = Pump(device, self.transfers, self._ring, self._broken)
        self._on_failure = on_failure
        self._max_block_s = max_block_s

    @property
    def capacity(self) -> int:
        """Largest tensor that the ring holds, in bytes."""
        return self._ring.capacity

    @property
    def pending(self) -> bool:
        """Whether copies are under way or due."""
        return self.transfers.pending

    @property
    def failed(self) -> bool:
        """Whether the device met an error, after which it is not captured any more."""
        return self.transfers.failed

    def start(self) -> None:
        """Start the copy pump. Raises RuntimeError where no further thread is allowed."""
        self._pump.start()

    def hurry(self) -> None:
        """Somebody waits for what is pending."""
        self._pump.hurry()

    def inside(self) -> bool:
        """Whether this thread is inside already: it runs a signal handler that interrupted it there."""
        return self._ring.inside() or self._rows.inside() or self.transfers.inside() or self.holding.inside()

    def deadline(self) -> float:
        """Until when (time.monotonic) a capture that begins now may wait for room."""
        return time.monotonic() + self._max_block_s

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream: then nothing may be issued."""
        return self._device.is_capturing()

    # -- training threads -------------------------------------------------------------------------------

    def snapshot(
        self, tensor: torch.Tensor, capture: Capture, dtype: torch.dtype, deadline: float
    ) -> Optional[DropReason]:
        """Copy `tensor`, cast to `dtype`, into the ring on the current stream; a reason if that cannot be.

        Waits for room until `deadline`; a signal handler is refused `inside`. The capture becomes ready by the pump.
        """
        if self.inside():
            return DropReason.INTERRUPTED
        nbytes = capture.descriptor.nbytes
        taken = self._room.take(nbytes, deadline)
        if taken is None:
            return self._no_room()
        slot, memory = taken
        room = ((self._ring, [slot]),)
        try:
            self._device.copy(memory, slot, tensor, dtype)
            event = self._device.record()
            return self._hand_over(
                Snapshot(capture, memory.tensor, nbytes, event, self._device.stream(), slot, room)
            )
        except BaseException as error:
            self._return(reason_of(error), capture, memory, slot, room)
            raise

    def snapshot_row(
        self, tensor: torch.Tensor, capture: Capture, dtype: torch.dtype, nbytes: int, deadline: float
    ) -> Optional[DropReason]:
        """Keep the statistics alone of `tensor` as `dtype`, which has `nbytes` then; else as `snapshot`.

        They are computed on the side stream, of a copy in the ring. A tensor without room there is computed on the
        current stream, from where it is.
        """
        if self.inside():
            return DropReason.INTERRUPTED
        taken = self._rows.take(ROW_NBYTES, deadline)
        if taken is None:
            return self._no_room()
        slot, memory = taken
        room: list[Room] = []
        kept = ((self._rows, [slot]),)
        try:
            source: Optional[torch.Tensor] = None
            copy = self._room.take(nbytes, 0.0)
            if copy is None:
                fill_row(tensor, memory.row(slot[0]), dtype)
            else:
                room = [(self._ring, [copy[0]])]
                self._device.copy(copy[1], copy[0], tensor, dtype)
                source = copy[1].flat(copy[0][0], tensor.numel(), dtype)
            capture.descriptor.row_offset = capture.descriptor.offset
            event = self._device.record()
            return self._hand_over(
                Snapshot(
                    capture,
                    memory.tensor,
                    ROW_NBYTES,
                    event,
                    self._device.stream(),
                    slot,
                    room,
                    kept=kept,
                    source=source,
                )
            )
        except BaseException as error:
            self._return(reason_of(error), capture, memory, slot, room, kept)
            raise

    def hold(self, tensor: torch.Tensor, capture: Capture, *, lent: bool = False) -> Optional[DropReason]:
        """Keep `tensor`, for which `can_hold` is true, until its bytes are copied; no room in the ring is needed.

        lent: nobody declared it immutable, see `capd_client.device.holding`.
        """
        with torch.inference_mode(False):  # there the view would have no version counter
            memory = tensor.detach().reshape(-1).view(torch.uint8)
        event, stream = self._device.record(), self._device.stream()
        nbytes = capture.descriptor.nbytes
        try:
            if lent:
                self.holding.add(nbytes)
            return self._hand_over(Snapshot(capture, memory, nbytes, event, stream, lent=lent))
        except BaseException:
            if lent and capture.thread:  # not handed over
                self.holding.give(nbytes)
            raise

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

    def _no_room(self) -> DropReason:
        return self._queue.refusing or (DropReason.INTERNAL if self.failed else DropReason.RING_FULL)

    def _hand_over(self, snapshot: Snapshot) -> Optional[DropReason]:
        if not self.transfers.add(snapshot):
            return DropReason.INTERNAL
        self.transfers.push()
        self._pump.wake()
        return None

    def _return(
        self,
        reason: DropReason,
        capture: Capture,
        memory: RingMemory,
        slot: Slot,
        room: Sequence[Room],
        kept: Sequence[Room] = (),
    ) -> None:
        """Drop a capture that is not handed over; what was issued may write to its room until the device is there."""
        if capture.thread:
            self._queue.abort(capture, reason)
            event, stream = self._device.record(), self._device.stream()
            self._hand_over(Snapshot(capture, memory.tensor, 0, event, stream, slot, room, kept=kept))

    # -- the copy pump ----------------------------------------------------------------------------------

    def advance(self) -> int:
        """Finish the copies that are done, issue those that are due; returns how many captures became ready."""
        return self.transfers.advance()

    def fail(self) -> None:
        """After a device error: drop everything under way and every later capture as internal errors, once each.

        The rings' memory goes back.
        """
        self.transfers.fail()
        self.stop()

    def _broken(self, error: Exception) -> None:
        self.fail()
        self._on_failure(error)

    def stop(self) -> None:
        """At the end of the session: whoever waits for room need not wait any longer, and the pump ends."""
        self._ring.close()
        self._rows.close()
        self._pump.stop()
