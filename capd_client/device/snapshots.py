"""The captures of device tensors on the training thread: a snapshot in the device ring, or the held tensor itself.

The training thread issues one device-to-device copy on its current stream and one event. The snapshot prevents races
with in-place writes, freed storages and the caching allocator. A tensor declared immutable is held instead, and needs
no copy. A tensor that autograd keeps is held, too, if the settings allow it (capd_client.device.holding). The copies
to the arena are made by capd_client.device.transfers, in the order of the captures.
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

# The room for statistics rows, separate from the ring. The rows are neighbours in it, as in the arena.
_ROWS_NBYTES = 1 << 20


class DeviceStager:
    """The stager of one device: takes its captures on training threads."""

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
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Allocate the ring and prepare the copy pump.

        Args:
            device: The device.
            queue: The in-flight captures of the session.
            buffer: The bytes of the arena.
            pace: The limit on bytes per second, shared by the stagers of a rank.
            max_block_s: How long a capture may wait for room (0: never).
            ordered: Whether the device waits for room in the ring, and not the thread.
            holding: The tensors that are held instead of copied, besides those declared immutable.
            piece_nbytes: The bytes of one copy to the arena; None: the default.
            on_failure: Called with an error of the device, after which the device is not captured any more.
        """
        self._device = device
        self._queue = queue
        # An inference tensor could not be written outside of inference mode.
        with torch.inference_mode(False):
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
        """The size of the largest tensor that fits in the ring, in bytes."""
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
        """Start the copy pump. Raises RuntimeError if the system allows no further thread."""
        self._pump.start()

    def hurry(self) -> None:
        """Note that somebody waits for pending captures."""
        self._pump.hurry()

    def inside(self) -> bool:
        """Return whether this thread is inside already. If so, a signal handler interrupted it there."""
        return self._ring.inside() or self._rows.inside() or self.transfers.inside() or self.holding.inside()

    def deadline(self) -> float:
        """Return the time (time.monotonic) until which a capture that begins now may wait for room."""
        return time.monotonic() + self._max_block_s

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured on the current stream. Nothing may be issued then."""
        return self._device.is_capturing()

    # -- training threads -------------------------------------------------------------------------------

    def snapshot(
        self, tensor: torch.Tensor, capture: Capture, dtype: torch.dtype, deadline: Optional[float]
    ) -> Optional[DropReason]:
        """Copy `tensor`, cast to `dtype`, into the ring on the current stream.

        The copy pump marks the capture ready later. A signal handler that interrupted this thread `inside` is refused.

        Args:
            tensor: The tensor.
            capture: The capture of the tensor.
            dtype: The dtype of the copy.
            deadline: The time (time.monotonic) until which the call may wait for room. None: neither the call nor its
                stream may wait.

        Returns:
            The reason if the copy is impossible, else None.
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
            event, stream = self._device.record(), self._device.stream()
            return self._hand_over(Snapshot(capture, memory.tensor, nbytes, event, stream, slot, room))
        except BaseException as error:
            self._return(reason_of(error), capture, memory, slot, room)
            raise

    def snapshot_row(
        self, tensor: torch.Tensor, capture: Capture, dtype: torch.dtype, nbytes: int, deadline: float
    ) -> Optional[DropReason]:
        """Keep only the statistics of `tensor` as `dtype`. Otherwise the call is like `snapshot`.

        The statistics are computed on the side stream, from a copy in the ring. If the ring has no room for the copy,
        they are computed on the current stream, from the tensor itself.

        Args:
            tensor: The tensor.
            capture: The capture of its statistics row.
            dtype: The dtype to which the tensor is cast before.
            nbytes: The bytes of the tensor as `dtype`.
            deadline: The time (time.monotonic) until which the call may wait for room.
        """
        if self.inside():
            return DropReason.INTERRUPTED
        taken = self._rows.take(ROW_NBYTES, deadline)
        if taken is None:
            return self._no_room()
        slot, memory = taken
        room: list[Room] = []
        row_room = ((self._rows, [slot]),)
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
            event, stream = self._device.record(), self._device.stream()
            row = Snapshot(capture, memory.tensor, ROW_NBYTES, event, stream, slot, room, row_room, source)
            return self._hand_over(row)
        except BaseException as error:
            self._return(reason_of(error), capture, memory, slot, room, row_room)
            raise

    def hold(self, tensor: torch.Tensor, capture: Capture, *, lent: bool = False) -> Optional[DropReason]:
        """Hold `tensor` until its bytes are copied; no room in the ring is needed. `can_hold` must be true for it.

        lent: nobody declared it immutable, see `capd_client.device.holding`.
        """
        # In inference mode the view would have no version counter.
        with torch.inference_mode(False):
            memory = tensor.detach().reshape(-1).view(torch.uint8)
        event, stream = self._device.record(), self._device.stream()
        nbytes = capture.descriptor.nbytes
        try:
            if lent:
                self.holding.add(nbytes)
            return self._hand_over(Snapshot(capture, memory, nbytes, event, stream, lent=lent))
        except BaseException:
            # A thread shows that the capture was not handed over.
            if lent and capture.thread:
                self.holding.give(nbytes)
            raise

    @staticmethod
    def can_hold(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether the tensor's memory holds the bytes to keep, and whether a change of it could be noticed.

        A small tensor is not worth a copy of its own. In the ring it shares one.
        """
        return (
            tensor.dtype is dtype
            and tensor.is_contiguous()
            and not tensor.is_neg()
            # Inference tensors have no version counter.
            and not tensor.is_inference()
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
        row_room: Sequence[Room] = (),
    ) -> None:
        """Drop a capture that is not handed over. Issued work may still write to its room, which returns after it."""
        if capture.thread:
            self._queue.abort(capture, reason)
            event, stream = self._device.record(), self._device.stream()
            self._hand_over(Snapshot(capture, memory.tensor, 0, event, stream, slot, room, row_room))

    # -- the copy pump ----------------------------------------------------------------------------------

    def advance(self) -> int:
        """Finish copies that are done and issue due ones. Return the number of captures that became ready."""
        return self.transfers.advance()

    def fail(self) -> None:
        """After a device error, drop all copies and every later capture as internal errors, each once.

        The memory of the rings is released.
        """
        self.transfers.fail()
        self.stop()

    def _broken(self, error: Exception) -> None:
        self.fail()
        self._on_failure(error)

    def stop(self) -> None:
        """End the session's use of the device: wake every thread that waits for room, and end the pump."""
        self._ring.close()
        self._rows.close()
        self._pump.stop()
