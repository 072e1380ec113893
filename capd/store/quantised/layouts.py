"""How codes and scales lie: packed fp4, scales in cuBLAS' 32x4x4 tiles, scales of blocks, padding."""

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
    """Scales [rows, columns] out of cuBLAS' layout: tiles of 128 x 4 one after the other, each as [32, 4, 4], in which
    row r of the tile lies at [r % 32, r // 32] (cuBLAS, "1D block scaling factors layout"). Padding is cropped.

    Raises ValueError where there are not as many scales as the padded tiles hold.
    """
    down, across = ceil(rows / _TILE_ROWS), ceil(columns / _TILE_COLUMNS)
    tiles = scales.reshape(down, across, 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)[:rows, :columns]


def unpacked_fp4(packed: NDArray[np.generic]) -> Values:
    """Values of e2m1 codes, two to a byte along the last axis, which becomes twice as long: the low nibble first."""
    pairs = value_table("float4_e2m1fn_x2")[packed.view(np.uint8)]
    return pairs.reshape(*packed.shape[:-1], -1).astype(np.float32)


def of_blocks(values: Values, scales: Values, block: tuple[int, int]) -> Values:
    """values [M, K] times the scale of the block [rows, columns] that each lies in; scales may be padded.

    Raises ValueError where there are too few scales.
    """
    wanted = tuple(ceil(size / step) for size, step in zip(values.shape, block, strict=True))
    if any(have < want for have, want in zip(scales.shape, wanted, strict=True)):
        raise ValueError(f"scales {list(scales.shape)} for blocks {list(wanted)}")
    scales = scales[: wanted[0], : wanted[1]]
    for axis, step in enumerate(block):
        scales = scales if step == 1 else np.repeat(scales, step, axis)
    return values * scales[: values.shape[0], : values.shape[1]]


def rows_of(values: NDArray[T]) -> NDArray[T]:
    """[…, K] as [M, K]."""
    return values.reshape(prod(values.shape[:-1]), values.shape[-1]) if values.ndim else values.reshape(1, 1)
