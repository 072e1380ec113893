"""The staging of device tensors: finds room for a tensor, then takes a snapshot, a hold, or parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional, Union

import torch

from capd_client.arena.allocator import GRANULE_NBYTES
from capd_client.arena.host_copy import order_of
from capd_client.device.snapshots import DeviceStager
from capd_client.devstats import ROW_DTYPES
from capd_client.inflight.capture import Capture, Refused
from capd_client.inflight.parts import PartCapture, Record
from capd_client.inflight.queue import Queue
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.statistics_row import ROW_NBYTES
from capd_client.staging.describe import Described
from capd_client.staging.drop_log import DropLog
from capd_client.staging.in_parts import pieces

__all__ = ["FromDevice"]


class FromDevice:
    """The stager of device tensors.

    Args:
        queue: Gives slots.
        log: The drop log.
        devices: Makes the DeviceStager of a device at its first capture, or returns the reason of the failure.
    """

    def __init__(
        self,
        queue: Queue,
        log: DropLog,
        devices: Callable[[torch.device], Union[DeviceStager, DropReason]],
    ) -> None:
        self._queue = queue
        self._log = log
        self._devices = devices

    def take(self, described: Described) -> None:
        """Capture a described device tensor. After a normal return, the offer is counted once."""
        stager = self._stager(described)
        if stager is None:
            return
        descriptor = described.descriptor
        if not descriptor.payload and described.dtype in ROW_DTYPES and descriptor.nbytes:
            self._take_row(stager, described)
        else:
            self._take_tensor(stager, described)

    def _stager(self, described: Described) -> Optional[DeviceStager]:
        """Return the stager of the tensor's device. If the device takes no captures now, refuse the offer: None."""
        stager = self._devices(described.source.device)
        capturing = isinstance(stager, DeviceStager) and stager.is_capturing()
        if isinstance(stager, DeviceStager) and not capturing and not stager.failed:
            return stager
        if capturing or stager is DropReason.STREAM_CAPTURE:
            reason = DropReason.STREAM_CAPTURE
            problem = "a CUDA graph is being captured, and its replays would not be captured"
        elif stager is DropReason.INTERRUPTED:
            reason, problem = stager, "it was made by a signal handler, while its device was set up"
        else:
            reason, problem = DropReason.INTERNAL, "its device could not be set up, or failed"
        refused = self._queue.turn_away(described.definition, described.descriptor, reason)
        if isinstance(refused, Refused):
            refused.problem = problem
            self._log.unfit(refused)
        return None

    def _take_row(self, stager: DeviceStager, described: Described) -> None:
        """Keep only the statistics, computed on the device."""
        descriptor = described.descriptor
        nbytes, descriptor.nbytes = descriptor.nbytes, 0
        # One deadline for both waits, for the arena and for the ring.
        deadline = stager.deadline()
        capture = self._queue.admit(described.definition, descriptor, ROW_NBYTES)
        if isinstance(capture, Refused):
            self._log.no_room(capture)
        else:
            self._snapshot_row(stager, described, capture, nbytes, deadline)

    def _take_tensor(self, stager: DeviceStager, described: Described) -> None:
        source, dtype, descriptor = described.source, described.dtype, described.descriptor
        order = None if source.is_contiguous() else order_of(source.shape, source.stride())
        # The elements in their order in memory.
        dense = source if order is None else source.permute(order)
        lent = not described.immutable and stager.holding.wants(described.definition.key, descriptor.nbytes)
        hold = (described.immutable or lent) and descriptor.payload and stager.can_hold(dense, dtype)
        nbytes = descriptor.nbytes
        deadline = stager.deadline()
        capture = self._admit(stager, described, hold=hold)
        if capture is None:
            return
        if isinstance(capture, Record):
            self._take_parts(stager, source, dtype, capture, hold=hold and order is None, lent=lent)
        elif capture.kept == "row":
            # There was only room for the statistics.
            self._snapshot_row(stager, described, capture, nbytes, deadline, reduced=True)
        elif not nbytes:
            self._queue.ready(capture)
        else:
            descriptor.order = order
            if hold:
                reason = stager.hold(dense, capture, lent=lent)
            else:
                waits = not described.definition.is_scalar
                reason = stager.snapshot(dense, capture, dtype, deadline if waits else None)
            if reason is DropReason.RING_FULL and self._queue.reduce(capture):
                descriptor.order = None
                self._snapshot_row(stager, described, capture, nbytes, deadline, reduced=True)
            else:
                self._conclude(stager, capture, reason)

    def _admit(self, stager: DeviceStager, described: Described, *, hold: bool) -> Optional[Capture]:
        """Return the capture, or None if the arena has no room or the ring is too small."""
        definition, descriptor = described.definition, described.descriptor
        nbytes, capacity = descriptor.nbytes, stager.capacity
        fits = hold or nbytes <= capacity
        if fits:
            capture = self._queue.admit(definition, descriptor)
        else:
            capture = self._queue.turn_away(definition, descriptor, DropReason.TOO_LARGE)
        if not isinstance(capture, Refused):
            return capture
        if fits:
            self._log.no_room(capture)
        else:
            self._log.too_large_for_ring(definition, nbytes, capacity)
        return None

    def _take_parts(
        self,
        stager: DeviceStager,
        source: torch.Tensor,
        dtype: torch.dtype,
        record: Record,
        *,
        hold: bool,
        lent: bool,
    ) -> None:
        """Send a tensor in parts that is too large for the arena or the ring."""
        if not hold and stager.capacity < GRANULE_NBYTES:
            self._queue.abort(record, DropReason.TOO_LARGE)
            self._log.too_large_for_ring(record.definition, record.descriptor.nbytes, stager.capacity)
            return
        nbytes = self._queue.part_nbytes
        if not hold:
            nbytes = min(nbytes, stager.capacity // 2)
        for view, piece in pieces(self._queue, record, source, nbytes):
            reason = (
                stager.hold(view, piece, lent=lent) if hold else _snapshot_part(stager, dtype, view, piece)
            )
            if reason is not None:
                self._queue.abort(piece, reason)
                break
        self._log.end_of_parts(record, nbytes)

    def _snapshot_row(
        self,
        stager: DeviceStager,
        described: Described,
        capture: Capture,
        nbytes: int,
        deadline: float,
        *,
        reduced: bool = False,
    ) -> None:
        """Keep the statistics of a tensor of `nbytes`. `reduced`: policy stats found no room for the tensor."""
        reason = stager.snapshot_row(described.source, capture, described.dtype, nbytes, deadline)
        if reduced and reason is None:
            self._log.reduced(described.source.nbytes)
        self._conclude(stager, capture, reason)

    def _conclude(self, stager: DeviceStager, capture: Capture, reason: Optional[DropReason]) -> None:
        """Drop a capture if it has a `reason`. None: the device has taken it."""
        if reason is not None:
            self._queue.abort(capture, reason)
        if reason is DropReason.RING_FULL:
            self._log.ring_full(stager.capacity)


def _snapshot_part(
    stager: DeviceStager, dtype: torch.dtype, view: torch.Tensor, piece: PartCapture
) -> Optional[DropReason]:
    """Put a piece of a device tensor into the ring. A wait for room there uses up the record's patience."""
    record, began = piece.record, time.monotonic()
    reason = stager.snapshot(view, piece, dtype, began + record.patience_s)
    record.patience_s -= time.monotonic() - began
    return reason
