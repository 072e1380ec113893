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
from capd_client.device import DeviceStager
from capd_client.errors import Counted
from capd_client.in_flight import Capture
from capd_client.large import snapshot_part, stage_in_parts
from capd_client.notices import Notices
from capd_client.parts import Record
from capd_client.protocol import Descriptor
from capd_client.refusing import Refusing
from capd_client.room import RoomNotices
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
        hold = immutable and descriptor.payload and stager.can_hold(source, dtype)
        row_at = None if hold else stager.row_place(dtype, descriptor.nbytes, descriptor.payload)
        room = descriptor.nbytes if row_at is None else row_at + ROW_NBYTES
        if row_at is not None and not descriptor.payload:
            descriptor.nbytes = 0  # the row is all that travels
        fits = hold or room <= stager.capacity
        deadline = stager.deadline()  # waiting for the arena and for the ring counts together
        try:
            if fits:
                capture = self._books.admit(definition, descriptor, room - descriptor.nbytes)
            else:
                capture = self._books.turn_away(definition, descriptor, DropReason.TOO_LARGE)
            if capture is None:
                if fits:
                    self._room.not_admitted(descriptor.moment.iteration, room)
                else:
                    self._room.too_large_for_ring(definition, room, stager.capacity)
                return
            if isinstance(capture, Record):
                if not hold and stager.capacity < GRANULE_NBYTES:
                    self._books.abort(capture, DropReason.TOO_LARGE)
                    self._room.too_large_for_ring(definition, room, stager.capacity)
                    return
                put = stager.hold if hold else partial(snapshot_part, stager, dtype)
                limit = None if hold else stager.capacity // 2
                stage_in_parts(self._books, self._notices, capture, source, put, limit)
                return
            if descriptor.row_offset is not None:  # there was no room
                hold, row_at = False, 0
            if hold:
                reason = stager.hold(source, capture)
            elif room:
                reason = self._snapshot(stager, source, dtype, capture, deadline, row_at)
            else:
                self._books.ready(capture)
                return
            if reason is not None:
                self._books.abort(capture, reason)
            if reason is DropReason.RING_FULL:
                self._room.ring_full(stager.capacity)
        except BaseException as error:
            self._books.break_off(descriptor, error)

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

    def _snapshot(
        self,
        stager: DeviceStager,
        source: torch.Tensor,
        dtype: torch.dtype,
        capture: Capture,
        deadline: float,
        row_at: Optional[int],
    ) -> Optional[DropReason]:
        """As `DeviceStager.snapshot`; under policy stats a full ring may still have room for the statistics."""
        reduced = capture.descriptor.row_offset is not None
        reason = stager.snapshot(source, capture, dtype, deadline, row_at)
        if reason is DropReason.RING_FULL and not reduced and self._books.reduce(capture):
            reduced = True
            reason = stager.snapshot(source, capture, dtype, deadline, 0)
        if reduced and reason is None:
            self._room.reduced(source.nbytes)
        return reason
