"""The stager: puts one copy of a described tensor into the arena, and marks the capture ready.

`capd_client.arena.host_copy` copies CPU tensors, and `capd_client.staging.from_device` takes device tensors. A tensor
too large for either goes in parts (`capd_client.staging.in_parts`). `capd_client.staging.border` catches all errors,
so none reaches the job.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Optional, Union

import torch

from capd_client.arena.arena import Arena
from capd_client.arena.host_copy import (
    GIL_HELD_NBYTES,
    MEMMOVE_NBYTES,
    HostCopy,
    move,
    move_holding_gil,
    order_of,
)
from capd_client.device.snapshots import DeviceStager
from capd_client.devstats import fill_row
from capd_client.errors import COUNTED
from capd_client.inflight.accounts import reason_of
from capd_client.inflight.capture import READY, Refused
from capd_client.inflight.definitions import Definition
from capd_client.inflight.parts import Record
from capd_client.inflight.queue import Queue
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.journal_layout import (
    USUAL,
    USUAL_IS_LEAF,
    USUAL_NO_PAYLOAD,
    USUAL_REQUIRES_GRAD,
    USUAL_STATISTICS,
)
from capd_client.protocol.key import MAX_NDIM, Moment
from capd_client.protocol.messages import Descriptor
from capd_client.protocol.statistics_row import ROW_VALUES
from capd_client.staging.describe import Described, descriptor_makers
from capd_client.staging.drop_log import DropLog
from capd_client.staging.from_device import FromDevice
from capd_client.staging.in_parts import pieces
from capd_client.tensors.inspect import DTYPES, modes_active, without_modes

__all__ = ["Stager"]

# In bytes. No tensor begins so far inside its storage.
_NO_OFFSET = 1 << 40
_FLOAT64 = struct.Struct("<d")


class Stager:
    """The stager of a session.

    Args:
        queue: Gives slots.
        arena: The memory of the slots.
        notices: The log.
        devices: Makes the DeviceStager of a device at its first capture, or returns the reason of the failure.
        payload: Whether tensors are kept, or only their statistics, if a capture does not name its store. The bytes of
            CPU tensors go to the daemon in both cases, and the daemon computes the statistics.
    """

    def __init__(
        self,
        queue: Queue,
        arena: Arena,
        notices: RateLimitedLog,
        devices: Callable[[torch.device], Union[DeviceStager, DropReason]],
        *,
        payload: bool = True,
    ) -> None:
        self._queue = queue
        self._journal = queue.journal
        self._makers = descriptor_makers(payload=payload)
        self._usual = {
            None: USUAL if payload else USUAL | USUAL_NO_PAYLOAD,
            "full": USUAL,
            "stats": USUAL | USUAL_NO_PAYLOAD,
            "both": USUAL | USUAL_STATISTICS,
        }
        self._buffer = arena.buffer
        self._host = HostCopy(arena.buffer, arena.address)
        self._small_nbytes = min(MEMMOVE_NBYTES, queue.slots.capacity)
        self._address = arena.address
        self._log = DropLog(notices, queue.policy)
        self._from_device = FromDevice(queue, self._log, devices)

    def put_known(
        self,
        tensor: torch.Tensor,
        definition: Definition,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        store: Optional[str],
    ) -> bool:
        """Capture a small plain CPU tensor by the short way.

        The method repeats `describe` and `put` on purpose, with as few calls as possible. Most captures are of this
        kind, and each call costs the job's thread a tenth of the whole capture.

        Returns:
            False if the tensor is not of this kind. Then nothing has changed.
        """
        try:
            address, shape, size = tensor.data_ptr(), tensor.shape, definition.item_nbytes
            nbytes = tensor.nbytes if size and cast_to is None else tensor.numel() * size
            # A freed storage has its data at null, so the tensor's data pointer equals its offset.
            freed = address < _NO_OFFSET and address == tensor.storage_offset() * tensor.element_size()
            contiguous = tensor.is_contiguous()
            order = None if contiguous else order_of(shape, tensor.stride())
            same = cast_to is None or tensor.dtype is cast_to
            movable = same and (contiguous or order is not None) and not tensor.is_neg()
        except (RuntimeError, NotImplementedError):
            # The tensor is not dense, or inside a function transform.
            return False
        if freed or not 0 < nbytes <= self._small_nbytes or len(shape) > MAX_NDIM:
            return False
        if not movable and (tensor.dtype not in DTYPES or modes_active()):
            return False
        differentiable = tensor.requires_grad
        # A tensor that is not differentiable is a leaf. A question to torch takes time.
        is_leaf = not differentiable or tensor.is_leaf
        descriptor = self._makers[store](
            0, 0, nbytes, definition.id, shape, moment, "cpu", differentiable, is_leaf
        )
        try:
            capture = self._queue.admit(definition, descriptor)
            if isinstance(capture, Refused):
                self._log.no_room(capture)
                return True
            whole = capture.kept == "payload"
            if not whole:
                with without_modes():
                    self._keep_row(tensor, tensor.dtype if cast_to is None else cast_to, descriptor)
            elif movable:
                descriptor.order = order
                copy = move_holding_gil if nbytes <= GIL_HELD_NBYTES else move
                copy(self._address + descriptor.offset, address, nbytes)
            else:
                self._fill(tensor, tensor.dtype if cast_to is None else cast_to, descriptor)
            if order is None and whole:
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
            # The border does not know the descriptor, so the offer is settled here.
            self._queue.settle(definition, descriptor, reason_of(error))
            setattr(error, COUNTED, True)
            raise
        return True

    def put_number(self, value: float, definition: Definition, moment: Moment) -> None:
        """Capture one float64 that is no tensor. It is kept in every mode."""
        descriptor = Descriptor(0, 0, _FLOAT64.size, definition.id, (), moment, "cpu", False, True)
        try:
            capture = self._queue.admit(definition, descriptor)
            if isinstance(capture, Refused):
                self._log.no_room(capture)
                return
            _FLOAT64.pack_into(self._buffer, descriptor.offset, value)
            self._journal.keep_usual(capture, (), moment, USUAL | USUAL_IS_LEAF)
            capture.state = READY
        except BaseException as error:
            # As in `put_known`.
            self._queue.settle(definition, descriptor, reason_of(error))
            setattr(error, COUNTED, True)
            raise

    def put(self, described: Described) -> None:
        """Capture a described tensor. After a normal return, it is counted once."""
        if described.source.is_cpu:
            self._from_host(described)
        else:
            self._from_device.take(described)

    def settle(self, described: Described, reason: DropReason) -> None:
        """End a capture that an error interrupted, and count it once."""
        self._queue.settle(described.definition, described.descriptor, reason)

    def _from_host(self, described: Described) -> None:
        source, dtype, descriptor = described.source, described.dtype, described.descriptor
        capture = self._queue.admit(described.definition, descriptor)
        if isinstance(capture, Refused):
            self._log.no_room(capture)
        elif isinstance(capture, Record):
            nbytes = self._queue.part_nbytes
            for view, piece in pieces(self._queue, capture, source, nbytes):
                self._host.fill(view, dtype, piece.descriptor.offset, piece.descriptor.nbytes)
                self._queue.ready(piece)
            self._log.end_of_parts(capture, nbytes)
        else:
            if capture.kept == "row":
                self._keep_row(source, dtype, descriptor)
            else:
                self._fill(source, dtype, descriptor)
            self._journal.keep(capture)
            capture.state = READY

    def _fill(self, source: torch.Tensor, dtype: torch.dtype, descriptor: Descriptor) -> None:
        """Copy the elements in their order in memory, which is several times faster than any other order."""
        order = None if source.is_contiguous() else order_of(source.shape, source.stride())
        if order is not None:
            descriptor.order, source = order, source.permute(order)
        self._host.fill(source, dtype, descriptor.offset, descriptor.nbytes)

    def _keep_row(self, source: torch.Tensor, dtype: torch.dtype, descriptor: Descriptor) -> None:
        """Write the statistics of a CPU tensor without room into the slot of its row."""
        place = torch.frombuffer(
            self._buffer, dtype=torch.float64, count=ROW_VALUES, offset=descriptor.offset
        )
        fill_row(source, place, dtype)
        self._log.reduced(source.nbytes)
