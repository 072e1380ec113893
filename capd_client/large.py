"""Hands a tensor larger than the arena over in parts: piece after piece of its bytes in C order, none made whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Optional

import torch

from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.notices import Notices
from capd_client.parts import PartCapture, PartedBooks, Record
from capd_client.snapshots import DeviceStager

__all__ = ["Put", "blocks", "snapshot_part", "stage_in_parts"]

Put = Callable[[torch.Tensor, PartCapture], Optional[DropReason]]
"""Copies a piece into its slot and marks the capture ready, then or later; or says why that cannot be."""


def blocks(tensor: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Views that are all of `tensor` one after the other in C order, each of at most `numel` ≥ 1 elements.

    A contiguous tensor is cut anywhere, any other one along its leading axes; nothing is copied.
    """
    if tensor.numel() <= numel:
        if tensor.numel():
            yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = tensor.numel() // tensor.shape[0]
    if row > numel:
        for index in range(tensor.shape[0]):
            yield from blocks(tensor[index], numel)
        return
    for first in range(0, tensor.shape[0], numel // row):
        yield tensor[first : first + numel // row]


def stage_in_parts(
    books: Books,
    notices: Notices,
    record: Record,
    source: torch.Tensor,
    put: Put,
    limit_nbytes: Optional[int] = None,
) -> None:
    """Cut `source` into pieces and `put` each, until all are there or the record is dropped.

    limit_nbytes: the most of one piece, where that is less than the arena gives. What `put` raises drops the record
    and is raised.
    """
    assert isinstance(books, PartedBooks)  # noqa: S101 - nobody else makes records
    nbytes = books.part_nbytes if limit_nbytes is None else min(books.part_nbytes, limit_nbytes)
    item_nbytes = record.definition.item_nbytes
    for view in blocks(source.detach(), nbytes // item_nbytes):
        piece = books.cut(record, view.numel() * item_nbytes)
        if piece is None:
            break
        try:
            reason = put(view, piece)
        except BaseException:
            if piece.thread:  # else its device has it, and lets go of it in the end
                books.abort(piece, DropReason.INTERNAL)
            raise
        if reason is not None:
            books.abort(piece, reason)
            break
    if record.dropped in (DropReason.ARENA_FULL, DropReason.RING_FULL):
        notices.warn(
            "gave_up",
            "a tensor of %d bytes, sent in parts of up to %d, was given up after a wait of max_block_ms for room: "
            "the daemon is slower than that, or absent. Raise CAPD_MAX_BLOCK_MS or CAPD_ARENA_BYTES",
            record.descriptor.nbytes,
            nbytes,
        )


def snapshot_part(
    stager: DeviceStager, dtype: torch.dtype, view: torch.Tensor, piece: PartCapture
) -> Optional[DropReason]:
    """Put a piece of a device tensor into the ring; waiting for room there takes of the record's patience."""
    record, began = piece.record, time.monotonic()
    reason = stager.snapshot(view, piece, dtype, began + record.patience_s)
    record.patience_s -= time.monotonic() - began
    return reason
