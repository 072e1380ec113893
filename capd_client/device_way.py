"""The way of a device tensor that is to be captured: finds room for it, then a snapshot, a hold, or parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Optional, Union

import torch

from capd_client.allocator import GRANULE_NBYTES
from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.definitions import Definition
from capd_client.devstats import ROW_DTYPES
from capd_client.errors import Counted
from capd_client.host_copy import order_of
from capd_client.in_flight import Capture
from capd_client.large import snapshot_part, stage_in_parts
from capd_client.notices import Notices
from capd_client.parts import Record
from capd_client.protocol import Descriptor
from capd_client.refusing import Refusing
from capd_client.room import RoomNotices
from capd_client.snapshots import DeviceStager
from capd_client.statistics_row import ROW_NBYTES

__all__ = ["DeviceWay"]


class DeviceWay:
    """devices: makes the DeviceStager of a device at its first capture, or says why not."""

    def __init__(
        self,
        books: Books,
        notices: Notices,
        devices: Callable[[torch.device], Union[DeviceStager, DropReason]],
    ) -> None:
        self._books = books
        self._notices = notices
        self._room = RoomNotices(books, notices)
        self._refuse = Refusing(books, notices).refuse
        self._devices = devices

    def take(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
        immutable: bool,
    ) -> None:
        """Capture `source` as `dtype`; counts the offer once, and where it raises Counted, too.

        descriptor: without offset and sequence. immutable: see `capd_client.api.capture`.
        """
        stager = self._stager(source.device, definition, descriptor)
        if stager is None:
            return
        if not descriptor.payload and dtype in ROW_DTYPES and descriptor.nbytes:
            self._take_row(stager, source, dtype, definition, descriptor)
        else:
            self._take_tensor(stager, source, dtype, definition, descriptor, immutable)

    def _take_row(
        self,
        stager: DeviceStager,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
    ) -> None:
        """Keep the statistics alone, computed here."""
        nbytes, descriptor.nbytes = descriptor.nbytes, 0
        deadline = stager.deadline()  # waiting for the arena and for the ring counts together
        try:
            capture = self._books.admit(definition, descriptor, ROW_NBYTES)
            if capture is None:
                self._room.not_admitted(descriptor.moment.iteration, ROW_NBYTES)
                return
            reason = stager.snapshot_row(source, capture, dtype, nbytes, deadline)
            self._settle(stager, capture, reason)
        except BaseException as error:
            self._books.break_off(descriptor, error)

    def _take_tensor(
        self,
        stager: DeviceStager,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
        immutable: bool,
    ) -> None:
        order = None if source.is_contiguous() else order_of(source.shape, source.stride())
        dense = source if order is None else source.permute(order)  # its elements as they are in memory
        lent = not immutable and stager.holding.wants(definition.key, descriptor.nbytes)
        hold = (immutable or lent) and descriptor.payload and stager.can_hold(dense, dtype)
        nbytes = descriptor.nbytes
        fits = hold or nbytes <= stager.capacity
        deadline = stager.deadline()
        try:
            if fits:
                capture = self._books.admit(definition, descriptor)
            else:
                capture = self._books.turn_away(definition, descriptor, DropReason.TOO_LARGE)
            if capture is None:
                if fits:
                    self._room.not_admitted(descriptor.moment.iteration, nbytes)
                else:
                    self._room.too_large_for_ring(definition, nbytes, stager.capacity)
            elif isinstance(capture, Record):
                self._take_parts(stager, source, dtype, capture, hold and order is None, lent)
            elif descriptor.row_offset is not None:  # there was no room but for the statistics
                self._settle(stager, capture, self._reduced(stager, source, dtype, capture, nbytes, deadline))
            elif not nbytes:
                self._books.ready(capture)
            else:
                descriptor.order = order
                if hold:
                    reason = stager.hold(dense, capture, lent=lent)
                else:
                    reason = stager.snapshot(dense, capture, dtype, deadline)
                if reason is DropReason.RING_FULL and self._books.reduce(capture):
                    descriptor.order = None
                    reason = self._reduced(stager, source, dtype, capture, nbytes, deadline)
                self._settle(stager, capture, reason)
        except BaseException as error:
            self._books.break_off(descriptor, error)

    def _take_parts(
        self,
        stager: DeviceStager,
        source: torch.Tensor,
        dtype: torch.dtype,
        record: Record,
        hold: bool,
        lent: bool,
    ) -> None:
        """Send what is too large for the arena or the ring in parts."""
        if not hold and stager.capacity < GRANULE_NBYTES:
            self._books.abort(record, DropReason.TOO_LARGE)
            self._room.too_large_for_ring(record.definition, record.descriptor.nbytes, stager.capacity)
            return
        put = partial(stager.hold, lent=lent) if hold else partial(snapshot_part, stager, dtype)
        limit = None if hold else stager.capacity // 2
        stage_in_parts(self._books, self._notices, record, source, put, limit)

    def _reduced(
        self,
        stager: DeviceStager,
        source: torch.Tensor,
        dtype: torch.dtype,
        capture: Capture,
        nbytes: int,
        deadline: float,
    ) -> Optional[DropReason]:
        """Under policy stats, where there is no room for a tensor: its statistics."""
        reason = stager.snapshot_row(source, capture, dtype, nbytes, deadline)
        if reason is None:
            self._room.reduced(source.nbytes)
        return reason

    def _settle(self, stager: DeviceStager, capture: Capture, reason: Optional[DropReason]) -> None:
        """Drop a capture that was not handed over, for `reason`."""
        if reason is not None:
            self._books.abort(capture, reason)
        if reason is DropReason.RING_FULL:
            self._room.ring_full(stager.capacity)

    def _stager(
        self, device: torch.device, definition: Definition, descriptor: Descriptor
    ) -> Optional[DeviceStager]:
        """The stager of a device that takes captures now; else None, and the offer is refused."""
        try:
            stager = self._devices(device)
            capturing = isinstance(stager, DeviceStager) and stager.is_capturing()
        except Exception as error:
            iteration = descriptor.moment.iteration
            self._books.refuse(definition, DropReason.INTERNAL, descriptor.nbytes, iteration)
            raise Counted from error
        if capturing or stager is DropReason.STREAM_CAPTURE:
            reason = DropReason.STREAM_CAPTURE
            problem = "a CUDA graph is being captured, whose replays would not come by here"
        elif not isinstance(stager, DeviceStager) or stager.failed:
            reason, problem = DropReason.INTERNAL, "its device could not be set up, or failed"
        else:
            return stager
        self._refuse(definition, reason, descriptor.moment, problem, descriptor.nbytes)
        return None
