"""The blocks of a tensor that share a scale: runs along an axis, tiles, or the whole tensor.

The rest of the package works on rows [blocks, values of a block]. If a length is not a multiple of the block, this
module fills the last block with zeros and crops them afterwards. Callers never see the fill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch.nn.functional import pad

from capd_client.formats.spec import Block

__all__ = ["Layout", "block_amax", "finite_amax", "pieces", "slabs"]

_MAGNITUDE = 0x7FFFFFFF

# A piece fits the caches of a core, and is long enough to make the cost of a call negligible.
PIECE_VALUES = 1 << 17


def pieces(values: torch.Tensor) -> Iterator[slice]:
    """Return ranges of the first dimension to process one at a time.

    On the CPU a range stays in the cache. On other devices one range covers everything.
    """
    count = values.shape[0]
    step = max(1, PIECE_VALUES // max(1, math.prod(values.shape[1:]))) if values.is_cpu else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


# Laying out a slab as rows may copy it, so this bounds the copy.
SLAB_VALUES = 1 << 20


def slabs(x: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    """Return parts of a tensor of `layout.shape` that no block crosses, each small enough to copy.

    A part has as many dimensions as x. It is larger than SLAB_VALUES only if a single block is.
    """
    steps = [1] * max(1, x.ndim)
    if layout.block is not None:
        across, along = (1, layout.block) if isinstance(layout.block, int) else layout.block
        if across > 1 and x.ndim > 1:
            # The other one of the last two dimensions.
            steps[-3 - layout.axis] = across
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
    """The blocks of a tensor of `shape`.

    block: None is one scale for the tensor. A number n is n values along `axis`. A tuple (r, n) is a tile of the last
    two axes: n values along `axis`, which must be one of them, and r values along the other one.
    """

    shape: torch.Size
    axis: int
    block: Block

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as rows [blocks, values of a block], contiguous, zero-filled; without blocks as values [n]."""
        if self.block is None:
            return x.contiguous().reshape(-1)
        moved = self._moved(x)
        fill = [-length % tile for length, tile in zip(moved.shape[-2:], self._tile, strict=True)]
        if any(fill):
            moved = pad(moved, (0, fill[1], 0, fill[0]))
        *lead, across, along = self._grid
        tiles = moved.reshape(*lead, across, self._tile[0], along, self._tile[1]).transpose(-3, -2)
        return tiles.reshape(math.prod(self._grid), math.prod(self._tile)).contiguous()

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the contiguous tensor whose `rows` these are, without the zero fill."""
        if self.block is None:
            return rows.reshape(self.shape)
        *lead, across, along = self._grid
        tiles = rows.reshape(*lead, across, along, *self._tile).transpose(-3, -2)
        whole = tiles.reshape(*lead, across * self._tile[0], along * self._tile[1])
        height, width = self._moved_shape[-2:]
        return self._unmoved(whole[..., :height, :width]).reshape(self.shape).contiguous()

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return one value per row, in the tensor's shape with each blocked axis divided by the block, rounded up."""
        if self.block is None:
            return scales.reshape(())
        found = self._unmoved(scales.reshape(self._grid))
        return (found.reshape(-1) if len(self.shape) < 2 else found).contiguous()

    def row_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `join_scales`: [blocks, 1], or [] without blocks."""
        return scales.reshape(()) if self.block is None else self._moved(scales).reshape(-1, 1)

    @property
    def has_fill(self) -> bool:
        """Whether zeros fill some blocks."""
        sizes = zip(self._moved_shape[-2:], self._tile, strict=True)
        return self.block is not None and any(size % tile for size, tile in sizes)

    @property
    def _tile(self) -> tuple[int, int]:
        """The values of a block across and along; a tile shrinks if the tensor ends before it does."""
        across, along = (1, self.block) if isinstance(self.block, int) else self.block or (1, 1)
        height, width = self._moved_shape[-2:]
        return min(across, _whole(height)), min(along, _whole(width))

    @property
    def _grid(self) -> tuple[int, ...]:
        """The number of blocks along each of the moved axes."""
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
        """Return x with the blocked axes last, in at least two dimensions."""
        return x.reshape(1, -1) if len(self.shape) < 2 else x.movedim(self.axis, -1)

    def _unmoved(self, x: torch.Tensor) -> torch.Tensor:
        return x if len(self.shape) < 2 else x.movedim(-1, self.axis)


def _whole(length: int) -> int:
    """Round a length up to a multiple of 32.

    The usual blocks are then never cut, and rows of their lengths are the fastest.
    """
    return -(-max(1, length) // 32) * 32


def block_amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude along the last axis, which is kept; NaN if a value is NaN.

    Args:
        values: float32.
    """
    # The order of magnitudes is that of their bits. The maximum of 16 integers takes a third of that of floats.
    bits = values.view(torch.int32).bitwise_and(_MAGNITUDE)
    return bits.amax(-1, keepdim=True).view(torch.float32)


def finite_amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude of all values, float32 []; 0 if no value is finite."""
    found: Optional[torch.Tensor] = None
    for piece in pieces(values):
        amax = values[piece].to(torch.float32).nan_to_num(0.0, 0.0, 0.0).abs().amax()
        found = amax if found is None else torch.maximum(found, amax)
    return values.new_zeros((), dtype=torch.float32) if found is None else found
