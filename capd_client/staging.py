"""Puts one copy of a tensor into the arena: checks it, gets a slot, copies, and marks the capture ready.

CPU tensors are copied by `capd_client.host_copy`, device tensors go the way of `capd_client.device`, and what is too
large for either goes in parts (`capd_client.large`). Errors are caught in `capd_client.session`, which counts and
logs them; none reaches the job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional, Union

import torch

from capd_client.allocator import GRANULE_NBYTES
from capd_client.arena import Arena
from capd_client.books import READY, Books, Capture
from capd_client.definitions import Definition
from capd_client.device import DeviceStager
from capd_client.errors import ConfigError
from capd_client.host_copy import GIL_HELD_NBYTES, MEMMOVE_NBYTES, HostCopy, move, move_holding_gil
from capd_client.key import MAX_NDIM, Key, Moment
from capd_client.large import Put, snapshot_part, stage_in_parts
from capd_client.notices import Notices
from capd_client.parts import PartCapture, PartedBooks, Record
from capd_client.protocol import MAX_METADATA_NBYTES, Descriptor, DropReason
from capd_client.reducing import write_row
from capd_client.room import RoomNotices
from capd_client.slicing import Slice
from capd_client.statistics_row import ROW_NBYTES
from capd_client.tensors import PLAIN_TYPES, modes_active, problem_of, unwrap, without_modes

__all__ = ["Counted", "Stager"]


class Counted(Exception):
    """An error after the capture was admitted: it is counted as a drop already. The error is its cause."""


class Stager:
    """The way of one tensor from the job into the arena.

    devices: makes the DeviceStager of a device at its first capture, or says why not. payload: whether tensors are
    kept; if not, the bytes go to the daemon all the same, which keeps their statistics.
    """

    def __init__(
        self,
        books: Books,
        arena: Arena,
        notices: Notices,
        devices: Callable[[torch.device], Union[DeviceStager, DropReason]],
        *,
        payload: bool = True,
    ) -> None:
        self._books = books
        self._buffer = arena.buffer
        self._host = HostCopy(arena.buffer, arena.address)
        self._small_nbytes = min(MEMMOVE_NBYTES, books.slots.capacity)
        self._address = arena.address
        self._notices = notices
        self._room = RoomNotices(books, notices)
        self._devices = devices
        self._describe = Descriptor if payload else partial(Descriptor, payload=False)

    def stage(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        metadata: str,
        take: Optional[Slice] = None,
        immutable: bool = False,
    ) -> None:
        """Capture the tensor, or what `take` takes of it.

        A normal return has counted the offer once, and so has Counted; other errors have not.
        """
        as_it_is = cast_to is None and attributes is None and take is None and not metadata
        if as_it_is and type(tensor) in PLAIN_TYPES and tensor.is_cpu:
            definition = self._books.definitions.found.get((id(key), tensor.dtype))
            if definition is not None and self._stage_small(tensor, definition, moment):
                return
        if modes_active():
            with without_modes():
                self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable)
        else:
            self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable)

    def _stage_small(self, tensor: torch.Tensor, definition: Definition, moment: Moment) -> bool:
        """The common case with as few calls as there can be; False, and nothing done, where it is not that case.

        A freed storage has its data at null, so the tensor's data pointer is its offset and nothing more.
        """
        item_nbytes = definition.item_nbytes
        try:
            address = tensor.data_ptr()
            nbytes = tensor.nbytes
            if (
                not tensor.is_contiguous()
                or not 0 < nbytes <= self._small_nbytes
                or address == tensor.storage_offset() * item_nbytes
                or not item_nbytes
                or tensor.is_neg()
            ):
                return False
        except (RuntimeError, NotImplementedError):  # not dense, or inside a function transform
            return False
        shape = tensor.shape
        if len(shape) > MAX_NDIM:
            return False
        descriptor = self._describe(
            0, 0, nbytes, definition.id, shape, moment, "cpu", tensor.requires_grad, tensor.is_leaf
        )
        capture = self._books.admit(definition, descriptor)
        if capture is None:
            self._room.not_admitted(descriptor)
            return True
        try:
            row_offset = descriptor.row_offset
            if row_offset is None:
                copy = move_holding_gil if nbytes <= GIL_HELD_NBYTES else move
                copy(self._address + descriptor.offset, address, nbytes)
            else:
                with without_modes():
                    self._keep_statistics(tensor, tensor.dtype, row_offset)
            capture.state = READY
        except BaseException as error:
            self._books.abort(capture, DropReason.INTERNAL)
            raise Counted from error
        return True

    def _stage(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        metadata: str,
        take: Optional[Slice],
        immutable: bool,
    ) -> None:
        source, problem = (tensor, "") if type(tensor) in PLAIN_TYPES else unwrap(tensor)
        if source is None:
            self._refuse(None, DropReason.UNSUPPORTED, moment, problem, name=str(key.tensor_name)[:80])
            return
        dtype = source.dtype if cast_to is None else cast_to
        definition = self._define(key, dtype, attributes, moment)
        if definition is None:
            return
        problem = problem_of(source)
        if problem or not definition.item_nbytes:
            problem = problem or f"dtype {dtype} is not kept"
            self._refuse(definition, DropReason.UNSUPPORTED, moment, problem)
            return
        if take is not None:
            try:
                source, metadata = take.apply(source, metadata)
            except ConfigError as error:
                self._refuse(definition, DropReason.INVALID_KEY, moment, str(error))
                return
        if metadata and not _fits(metadata):
            self._refuse(
                definition, DropReason.INVALID_KEY, moment, f"metadata above {MAX_METADATA_NBYTES} bytes"
            )
            return
        descriptor = self._describe(
            sequence=0,
            offset=0,
            nbytes=source.numel() * definition.item_nbytes,
            key_id=definition.id,
            shape=tuple(source.shape),
            moment=moment,
            device="cpu" if source.is_cpu else str(source.device),
            requires_grad=tensor.requires_grad,
            is_leaf=tensor.is_leaf,
            metadata=metadata,
        )
        if source.is_cpu:
            self._from_host(source, dtype, definition, descriptor)
        else:
            self._from_device(source, dtype, definition, descriptor, immutable)

    def _define(
        self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]], moment: Moment
    ) -> Optional[Definition]:
        definition = self._books.definitions.find(key, dtype, attributes)
        if definition is not None:
            return definition
        try:
            with self._books.lock:
                return self._books.definitions.make(key, dtype, attributes)
        except ConfigError as error:
            self._refuse(None, DropReason.INVALID_KEY, moment, str(error), name=str(key.tensor_name)[:80])
            return None

    def _from_host(
        self, source: torch.Tensor, dtype: torch.dtype, definition: Definition, descriptor: Descriptor
    ) -> None:
        capture = self._books.admit(definition, descriptor)
        if capture is None:
            self._room.not_admitted(descriptor)
            return
        try:
            if isinstance(capture, Record):
                self._in_parts(source, capture, partial(self._fill_part, dtype))
                return
            if descriptor.row_offset is not None:
                self._keep_statistics(source, dtype, descriptor.row_offset)
            else:
                self._host.fill(source, dtype, descriptor.offset, descriptor.nbytes)
            capture.state = READY
        except BaseException as error:
            self._books.abort(capture, DropReason.INTERNAL)
            raise Counted from error

    def _in_parts(self, source: torch.Tensor, record: Record, put: Put, nbytes: Optional[int] = None) -> None:
        """nbytes: the most of one part, if not what the arena gives."""
        books = self._books
        assert isinstance(books, PartedBooks)  # noqa: S101 - nobody else makes records
        limit = books.part_nbytes if nbytes is None else min(books.part_nbytes, nbytes)
        stage_in_parts(books, self._notices, record, source, limit, put)

    def _fill_part(self, dtype: torch.dtype, view: torch.Tensor, piece: PartCapture) -> None:
        self._host.fill(view, dtype, piece.descriptor.offset, piece.descriptor.nbytes)
        self._books.ready(piece)

    def _keep_statistics(self, source: torch.Tensor, dtype: torch.dtype, row_offset: int) -> None:
        """Write the statistics of a CPU tensor that found no room to the place that `admit` found for them."""
        write_row(self._buffer, source, dtype, row_offset)
        self._room.reduced(source.nbytes)

    def _from_device(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
        immutable: bool,
    ) -> None:
        stager = self._devices(source.device)
        if stager is DropReason.STREAM_CAPTURE or (
            isinstance(stager, DeviceStager) and stager.is_capturing()
        ):
            problem = "a CUDA graph is being captured, whose replays would not come by here"
            self._refuse(definition, DropReason.STREAM_CAPTURE, descriptor.moment, problem)
            return
        if not isinstance(stager, DeviceStager) or stager.failed:
            self._refuse(definition, DropReason.INTERNAL, descriptor.moment, "its device could not be set up")
            return
        hold = immutable and descriptor.payload and stager.can_hold(source, dtype)
        row_at = None if hold else stager.row_place(dtype, descriptor.nbytes, descriptor.payload)
        room = descriptor.nbytes if row_at is None else row_at + ROW_NBYTES
        if row_at is not None and not descriptor.payload:
            descriptor.nbytes = 0  # the row is all that travels
        fits = hold or room <= stager.capacity
        deadline = stager.deadline()  # waiting for the arena and for the ring counts together
        if fits:
            capture = self._books.admit(definition, descriptor, room - descriptor.nbytes)
        else:
            capture = self._books.turn_away(definition, descriptor, DropReason.TOO_LARGE)
        if capture is None:
            if fits:
                self._room.not_admitted(descriptor)
            else:
                self._room.too_large_for_ring(definition, room, stager.capacity)
            return
        try:
            if isinstance(capture, Record):
                if not hold and stager.capacity < GRANULE_NBYTES:
                    self._books.abort(capture, DropReason.TOO_LARGE)
                    self._room.too_large_for_ring(definition, room, stager.capacity)
                    return
                put = stager.hold if hold else partial(snapshot_part, stager, dtype)
                self._in_parts(source, capture, put, None if hold else stager.capacity // 2)
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
        except BaseException as error:
            self._books.abort(capture, DropReason.INTERNAL)
            raise Counted from error
        if reason is not None:
            self._books.abort(capture, reason)
        if reason is DropReason.RING_FULL:
            self._room.ring_full(stager.capacity)

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

    def _refuse(
        self,
        definition: Optional[Definition],
        reason: DropReason,
        moment: Moment,
        problem: str,
        nbytes: int = 0,
        *,
        name: str = "",
    ) -> None:
        self._books.refuse(definition, reason, nbytes, moment.iteration)
        if definition is not None:
            name = definition.key.tensor_name
        self._notices.warn(reason.value, "%s is not captured: %s", name, problem)


def _fits(metadata: str) -> bool:
    """Whether the metadata's UTF-8 is within the limit; what has no UTF-8 is not."""
    try:
        return len(metadata.encode()) <= MAX_METADATA_NBYTES
    except UnicodeEncodeError:
        return False
