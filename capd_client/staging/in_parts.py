"""The pieces of a tensor that is sent in parts: its bytes in C order. The whole tensor is never copied at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from capd_client.inflight.parts import PartCapture, Record
from capd_client.inflight.queue import Queue

__all__ = ["blocks", "pieces"]


def blocks(tensor: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Yield views that cover `tensor` in C order, each of at most `numel` ≥ 1 elements. Nothing is copied.

    A contiguous tensor is cut anywhere, any other tensor along its leading axes.
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
    """Yield the pieces of `source`, each with its capture, until the end or until the record is dropped.

    Args:
        queue: Gives each piece its slot, and waits for it.
        record: The capture of the whole tensor.
        source: A plain tensor of any device and layout.
        nbytes: The largest size of one piece, in the record's dtype.

    Yields:
        A view, and the capture for its bytes.
    """
    item_nbytes = record.definition.item_nbytes
    for view in blocks(source.detach(), nbytes // item_nbytes):
        piece = queue.cut(record, view.numel() * item_nbytes)
        if piece is None:
            return
        yield view, piece
