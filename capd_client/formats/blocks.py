"""How a tensor is cut into the blocks that share a scale: along an axis, in tiles, or not at all.

Everything below works on rows [blocks, values of a block]; lengths that are no multiple of the block are filled
with zeros here and cropped here, so no caller sees them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch.nn.functional import pad

from capd_client.formats.spec import Block

__all__ = ["Layout", "finite_amax", "pieces", "slabs"]

PIECE_VALUES = 1 << 17  # few enough for the caches of a core, enough to make little of the cost of a call


def pieces(values: torch.Tensor) -> Iterator[slice]:
    """Ranges of the first dimension that are worked on at once: on the CPU what stays in the cache, else all."""
    count = values.shape[0]
    step = max(1, PIECE_VALUES // max(1, math.prod(values.shape[1:]))) if values.is_cpu else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


SLAB_VALUES = 1 << 20  # what is laid out as rows at once: that may take a copy


def slabs(x: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    """Parts of a tensor of `layout.shape` that no block crosses, each of x's number of dimensions, few enough to copy.

    A part is larger than SLAB_VALUES only where a single block is.
    """
    steps = [1] * max(1, x.ndim)
    if layout.block is not None:
        across, along = (1, layout.block) if isinstance(layout.block, int) else layout.block
        if across > 1 and x.ndim > 1:
            steps[-3 - layout.axis] = across  # the other one of the last two
        steps[layout.axis] = along
    yield from _cut(x.reshape(1) if x.ndim == 0 else x, steps, 0)


def _cut(x: torch.Tensor, steps: list[int], dim: int) -> Iterator[torch.Tensor]:
    if x.numel() <= SLAB_VALUES or dim == x.ndim:
        yield x
        return
    size = x.shape[dim]
    wanted = SLAB_VALUES // (x.numel() // size) // steps[dim] * steps[dim]
    for start in range(0, size, step := max(steps[dim], wanted)):
        yield from _cut(x.narrow(dim, start, min(step, size - start)), steps, dim + 1)


@dataclass(frozen=True)
class Layout:
    """The blocks of a tensor of `shape`: `block` None (one scale), n along `axis`, or tiles of (r, n).

    Tiles lie over the last two axes, n along `axis`, which must be one of them, and r along the other one.
    """

    shape: torch.Size
    axis: int
    block: Block

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[blocks, values of a block], contiguous, zero-filled; without blocks all values, [n]."""
        if self.block is None:
            return x.contiguous().reshape(-1)
        moved = self._moved(x)
        fill = [-length % tile for length, tile in zip(moved.shape[-2:], self._tile, strict=True)]
        if any(fill):
            moved = pad(moved, (0, fill[1], 0, fill[0]))
        *lead, across, along = self._grid
        tiles = moved.reshape(*lead, across, self._tile[0], along, self._tile[1]).transpose(-3, -2)
        return tiles.reshape(math.prod(self._grid), math.prod(self._tile))

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `rows`: the tensor, contiguous, without what was filled."""
        if self.block is None:
            return rows.reshape(self.shape)
        *lead, across, along = self._grid
        tiles = rows.reshape(*lead, across, along, *self._tile).transpose(-3, -2)
        whole = tiles.reshape(*lead, across * self._tile[0], along * self._tile[1])
        height, width = self._moved_shape[-2:]
        return self._unmoved(whole[..., :height, :width]).reshape(self.shape).contiguous()

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """One value per row, in the tensor's shape with each blocked axis divided by the block, rounded up."""
        if self.block is None:
            return scales.reshape(())
        found = self._unmoved(scales.reshape(self._grid))
        return (found.reshape(-1) if len(self.shape) < 2 else found).contiguous()

    def row_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """The inverse of `join_scales`: [blocks, 1], or [] without blocks."""
        return scales.reshape(()) if self.block is None else self._moved(scales).reshape(-1, 1)

    @property
    def _tile(self) -> tuple[int, int]:
        """Values of a block across and along; cut behind the tensor's end, where zeros alone would be filled in."""
        across, along = (1, self.block) if isinstance(self.block, int) else self.block or (1, 1)
        height, width = self._moved_shape[-2:]
        return min(across, _whole(height)), min(along, _whole(width))

    @property
    def _grid(self) -> tuple[int, ...]:
        """How many blocks lie along each of the moved axes."""
        *lead, height, width = self._moved_shape
        return (*lead, -(-height // self._tile[0]), -(-width // self._tile[1]))

    @property
    def _moved_shape(self) -> tuple[int, ...]:
        if len(self.shape) < 2:
            return (1, self.shape.numel())
        rest = list(self.shape)
        along = rest.pop(self.axis)
        return (*rest, along)

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        """With the blocked axes last, in at least two dimensions."""
        return x.reshape(1, -1) if len(self.shape) < 2 else x.movedim(self.axis, -1)

    def _unmoved(self, x: torch.Tensor) -> torch.Tensor:
        return x if len(self.shape) < 2 else x.movedim(-1, self.axis)


def _whole(length: int) -> int:
    """In steps of 32, so that the usual blocks are never cut: rows of their lengths are the fastest."""
    return -(-max(1, length) // 32) * 32


def finite_amax(values: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of all values, float32 []; 0 where there is none."""
    found: Optional[torch.Tensor] = None
    for piece in pieces(values):
        amax = values[piece].to(torch.float32).nan_to_num(0.0, 0.0, 0.0).abs().amax()
        found = amax if found is None else torch.maximum(found, amax)
    return values.new_zeros((), dtype=torch.float32) if found is None else found
