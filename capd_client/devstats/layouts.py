"""Cuts a tensor of any layout into contiguous pieces, cast if asked, and merges their rows.

Statistics do not depend on the order of elements, so a transposed tensor is read in memory order. Only a tensor with
gaps, or one that is cast, is copied, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["merge_row", "pieces"]

# Elements copied at once. On a device a piece takes several launches, and 16 MB as bf16.
_PIECE, _DEVICE_PIECE = 1 << 20, 1 << 23


def pieces(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield all elements of `tensor` as `dtype`, in flat pieces. A dense tensor that needs no cast is one view."""
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    tensor = tensor.permute(by_stride)
    if not tensor.is_contiguous():
        yield from _copied(tensor, dtype)
    elif tensor.dtype is dtype and not tensor.is_neg():
        yield tensor.view(-1)
    else:
        for piece in torch.split(tensor.view(-1), _limit(tensor)):
            yield piece.to(dtype).resolve_neg()


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield pieces of a tensor [n, …] with gaps, cut along its first dimension."""
    limit = _limit(tensor)
    rows = max(1, limit * tensor.shape[0] // tensor.numel())
    for piece in torch.split(tensor, rows):
        # A piece above the limit is a single row.
        if piece.numel() > limit and piece.ndim > 1:
            yield from _copied(piece[0], dtype)
        # Not every one-byte dtype has a copy kernel, so these are copied as uint8.
        elif dtype is tensor.dtype and dtype.itemsize == 1:
            yield piece.view(torch.uint8).flatten().view(dtype)
        else:
            yield piece.to(dtype).resolve_neg().flatten()


def _limit(tensor: torch.Tensor) -> int:
    return _PIECE if tensor.is_cpu else _DEVICE_PIECE


def merge_row(row: torch.Tensor, other: torch.Tensor) -> None:
    """Add the statistics in `other` to those in `row`. NaN extremes, of a part without finite elements, are ignored."""
    low, high = torch.fmin(row[4:5], other[4:5]), torch.fmax(row[5:7], other[5:7])
    row.add_(other)
    row[4:5].copy_(low)
    row[5:7].copy_(high)
