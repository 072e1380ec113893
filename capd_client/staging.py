"""Puts one copy of a described tensor into the arena: gets a slot, copies, and marks the capture ready.

CPU tensors are copied by `capd_client.host_copy`, device tensors go the way of `capd_client.device_way`, and what is
too large for either goes in parts (`capd_client.large`). Errors are caught in `capd_client.session`, which counts and
logs them; none reaches the job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional, Union

import torch

from capd_client.arena import Arena
from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.definitions import Definition
from capd_client.describing import Describing
from capd_client.device_way import DeviceWay
from capd_client.host_copy import GIL_HELD_NBYTES, MEMMOVE_NBYTES, HostCopy, move, move_holding_gil, order_of
from capd_client.in_flight import READY
from capd_client.journal_layout import (
    USUAL,
    USUAL_IS_LEAF,
    USUAL_NO_PAYLOAD,
    USUAL_REQUIRES_GRAD,
    USUAL_STATISTICS,
)
from capd_client.key import MAX_NDIM, Key, Moment
from capd_client.large import stage_in_parts
from capd_client.notices import Notices
from capd_client.parts import PartCapture, Record
from capd_client.protocol import Descriptor
from capd_client.reducing import write_row
from capd_client.room import RoomNotices
from capd_client.slicing import Slice
from capd_client.snapshots import DeviceStager
from capd_client.tensors import DTYPES, PLAIN_TYPES, is_tracing, modes_active, without_modes

__all__ = ["Stager"]

_NO_OFFSET = 1 << 40  # bytes: no tensor begins so far inside of its storage


class Stager(Describing):
    """The way of one tensor from the job into the arena.

    devices: makes the DeviceStager of a device at its first capture, or says why not. payload: as for
    Describing. Where only statistics are kept the bytes go to the daemon all the same, which computes them.
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
        super().__init__(books, notices, payload=payload)
        self._books: Books = books
        self._found = books.definitions.found
        self._journal = books.journal
        self._usual = {
            None: USUAL if payload else USUAL | USUAL_NO_PAYLOAD,
            "full": USUAL,
            "stats": USUAL | USUAL_NO_PAYLOAD,
            "both": USUAL | USUAL_STATISTICS,
        }
        self._buffer = arena.buffer
        self._host = HostCopy(arena.buffer, arena.address)
        self._small_nbytes = min(MEMMOVE_NBYTES, books.slots.capacity)
        self._address = arena.address
        self._notices = notices
        self._room = RoomNotices(books, notices)
        self._device_way = DeviceWay(books, notices, devices)

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
        store: Optional[str] = None,
    ) -> None:
        """Capture the tensor, or what `take` takes of it.

        A normal return has counted the offer once, and so has Counted; other errors have not.
        """
        if (
            take is None
            and not metadata
            and type(tensor) in PLAIN_TYPES
            and tensor.is_cpu
            and not is_tracing()  # in which numbers of elements are tensors
        ):
            dtype = tensor.dtype if cast_to is None else cast_to
            definition = self._found.get((id(key), dtype, id(attributes)))
            if definition is not None and self._stage_known(
                tensor, dtype, cast_to, definition, moment, store
            ):
                return
        super().stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)

    def _stage_known(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        cast_to: Optional[torch.dtype],
        definition: Definition,
        moment: Moment,
        store: Optional[str],
    ) -> bool:
        """The common case with as few calls as there can be; False, and nothing done, where it is not that case.

        A freed storage has its data at null, so the tensor's data pointer is its offset and nothing more.
        """
        try:
            address, shape, size = tensor.data_ptr(), tensor.shape, definition.item_nbytes
            nbytes = tensor.nbytes if size and cast_to is None else tensor.numel() * size
            freed = address < _NO_OFFSET and address == tensor.storage_offset() * tensor.element_size()
            contiguous = tensor.is_contiguous()
            order = None if contiguous else order_of(shape, tensor.stride())
            same = cast_to is None or tensor.dtype is cast_to
            movable = same and (contiguous or order is not None) and not tensor.is_neg()
        except (RuntimeError, NotImplementedError):  # not dense, or inside a function transform
            return False
        if freed or not 0 < nbytes <= self._small_nbytes or len(shape) > MAX_NDIM:
            return False
        if not movable and (tensor.dtype not in DTYPES or modes_active()):
            return False
        differentiable = tensor.requires_grad  # what is not is a leaf: asking torch takes time
        is_leaf = not differentiable or tensor.is_leaf
        descriptor = self._describe[store](
            0, 0, nbytes, definition.id, shape, moment, "cpu", differentiable, is_leaf
        )
        try:
            capture = self._books.admit(definition, descriptor)
            if capture is None:
                self._room.not_admitted(moment.iteration, nbytes)
                return True
            row_offset = descriptor.row_offset
            if row_offset is not None:
                with without_modes():
                    self._keep_statistics(tensor, dtype, row_offset)
            elif movable:
                descriptor.order = order
                copy = move_holding_gil if nbytes <= GIL_HELD_NBYTES else move
                copy(self._address + descriptor.offset, address, nbytes)
            else:
                self._fill(tensor, dtype, descriptor)
            if order is None and row_offset is None:
                flags = self._usual[store]
                if differentiable:
                    flags |= USUAL_REQUIRES_GRAD
                if is_leaf:
                    flags |= USUAL_IS_LEAF
                self._journal.keep_usual(capture, shape, moment, flags)
            else:
                self._journal.keep(capture)
            capture.state = READY
        except BaseException as error:
            self._books.break_off(descriptor, error)
        return True

    def _put(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
        immutable: bool,
    ) -> None:
        if source.is_cpu:
            self._from_host(source, dtype, definition, descriptor)
        else:
            self._device_way.take(source, dtype, definition, descriptor, immutable)

    def _from_host(
        self, source: torch.Tensor, dtype: torch.dtype, definition: Definition, descriptor: Descriptor
    ) -> None:
        try:
            capture = self._books.admit(definition, descriptor)
            if capture is None:
                self._room.not_admitted(descriptor.moment.iteration, descriptor.nbytes)
                return
            if isinstance(capture, Record):
                stage_in_parts(self._books, self._notices, capture, source, partial(self._fill_part, dtype))
                return
            if descriptor.row_offset is not None:
                self._keep_statistics(source, dtype, descriptor.row_offset)
            else:
                self._fill(source, dtype, descriptor)
            self._journal.keep(capture)
            capture.state = READY
        except BaseException as error:
            self._books.break_off(descriptor, error)

    def _fill(self, source: torch.Tensor, dtype: torch.dtype, descriptor: Descriptor) -> None:
        """Copy its elements in the order in which they lie, which is several times faster than another one."""
        order = None if source.is_contiguous() else order_of(source.shape, source.stride())
        if order is not None:
            descriptor.order, source = order, source.permute(order)
        self._host.fill(source, dtype, descriptor.offset, descriptor.nbytes)

    def _fill_part(self, dtype: torch.dtype, view: torch.Tensor, piece: PartCapture) -> None:
        self._host.fill(view, dtype, piece.descriptor.offset, piece.descriptor.nbytes)
        self._books.ready(piece)

    def _keep_statistics(self, source: torch.Tensor, dtype: torch.dtype, row_offset: int) -> None:
        """Write the statistics of a CPU tensor that found no room to the place that `admit` found for them."""
        write_row(self._buffer, source, dtype, row_offset)
        self._room.reduced(source.nbytes)
