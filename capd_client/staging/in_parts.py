"""The pieces of a tensor that goes in parts: its bytes in C order, one after the other, none made whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from capd_client.inflight.parts import PartCapture, Record
from capd_client.inflight.queue import Queue

__all__ = ["blocks", "pieces"]


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


def pieces(
    queue: Queue, record: Record, source: torch.Tensor, nbytes: int
) -> Iterator[tuple[torch.Tensor, PartCapture]]:
    """Pieces of `source`, each with its capture, until all are there or the record is dropped.

    Args:
        queue: Gives each piece its slot, and waits for it.
        record: Of the whole tensor.
        source: A plain tensor of any device and layout.
        nbytes: The most of one piece, in the record's dtype.

    Yields:
        A view, and the capture that its bytes are to be copied into.
    """
    item_nbytes = record.definition.item_nbytes
    for view in blocks(source.detach(), nbytes // item_nbytes):
        piece = queue.cut(record, view.numel() * item_nbytes)
        if piece is None:
            return
        yield view, piece
