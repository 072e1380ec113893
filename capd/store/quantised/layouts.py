"""The layouts of codes and scales: packed fp4, scales in cuBLAS' 32x4x4 tiles, scales of blocks, padding."""

from __future__ import annotations

from math import ceil, prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from capd.store.format.dtypes import value_table

__all__ = ["of_blocks", "rows_of", "unpacked_fp4", "unswizzled"]

T = TypeVar("T", bound=np.generic)
Values = NDArray[np.float32]
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def unswizzled(scales: NDArray[np.generic], rows: int, columns: int) -> NDArray[np.generic]:
    """Return scales in cuBLAS' layout as [rows, columns], without padding.

    The layout is a sequence of tiles of 128 x 4 scales, each stored as [32, 4, 4]. Row r of a tile is at
    [r % 32, r // 32] (cuBLAS, "1D block scaling factors layout").

    Raises:
        ValueError: The number of scales differs from that of the padded tiles.
    """
    down, across = ceil(rows / _TILE_ROWS), ceil(columns / _TILE_COLUMNS)
    tiles = scales.reshape(down, across, 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)[:rows, :columns]


def unpacked_fp4(packed: NDArray[np.generic]) -> Values:
    """Return the values of e2m1 codes, two per byte, low nibble first. The last axis becomes twice as long."""
    pairs = value_table("float4_e2m1fn_x2")[packed.view(np.uint8)]
    return pairs.reshape(*packed.shape[:-1], -1).astype(np.float32)


def of_blocks(values: Values, scales: Values, block: tuple[int, int]) -> Values:
    """Multiply each value by the scale of its block.

    Args:
        values: The values [M, K].
        scales: The scales [blocks along M, blocks along K]. They may be padded at the end.
        block: The size of a block [rows, columns].

    Raises:
        ValueError: There are too few scales.
    """
    wanted = tuple(ceil(size / step) for size, step in zip(values.shape, block, strict=True))
    if any(have < want for have, want in zip(scales.shape, wanted, strict=True)):
        raise ValueError(f"scales {list(scales.shape)} for blocks {list(wanted)}")
    scales = scales[: wanted[0], : wanted[1]]
    for axis, step in enumerate(block):
        scales = scales if step == 1 else np.repeat(scales, step, axis)
    return values * scales[: values.shape[0], : values.shape[1]]


def rows_of(values: NDArray[T]) -> NDArray[T]:
    """Return an array […, K] as [M, K]."""
    return values.reshape(prod(values.shape[:-1]), values.shape[-1]) if values.ndim else values.reshape(1, 1)
