"""Statistics computed in the rank, on the tensor's own device: one pass, no payload on the link, no wait.

`fill_row` writes the row of `capd_client.protocol.statistics_row` by operations of the current stream alone. The host
does not synchronise, and temporary memory is at most one block. `fill_rows` writes many rows at once.
docs/statistics.md defines the fields and the accuracy of each method. The methods:

- On the CPU, 8-bit dtypes and large 16-bit tensors take one histogram of the bit patterns, and a table (`codes`).
- A GPU for which `prepare` has run takes a Triton kernel (`launching`, imported by `prepare` alone).
- Everything else takes torch's own operations, block by block (`formulas`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch

from capd_client.devstats.codes import fill_from_codes, has_codes
from capd_client.devstats.formulas import fill_from_values
from capd_client.devstats.layouts import merge_row, pieces
from capd_client.devstats.prepared import Segment, fill_by_kernel, fill_on_device, has_kernel, prepare
from capd_client.devstats.warming import warm
from capd_client.protocol.statistics_row import NO_ROW_DTYPES
from capd_client.tensors.inspect import DTYPES

__all__ = ["ROW_DTYPES", "Segment", "fill_row", "fill_rows", "has_kernel", "prepare", "warm"]

ROW_DTYPES: frozenset[torch.dtype] = frozenset(
    dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") not in NO_ROW_DTYPES
)
"""The dtypes of this torch for which a rank can compute a row."""


def fill_row(tensor: torch.Tensor, row: torch.Tensor, dtype: Optional[torch.dtype] = None) -> None:
    """Write the statistics of `tensor` into `row`, on the current stream.

    Args:
        tensor: A plain, strided tensor on the CPU or a CUDA device.
        row: float64 [ROW_VALUES] on the same device, contiguous; it is overwritten.
        dtype: One of ROW_DTYPES, to which the tensor is cast; None is the tensor's own.
    """
    target = row
    for piece in pieces(tensor.detach(), tensor.dtype if dtype is None else dtype):
        _fill(piece, target)
        if target is row:
            target = torch.empty_like(row)
        else:
            merge_row(row, target)


def fill_rows(segments: Sequence[Segment]) -> None:
    """Write the rows of many tensors, on the current stream: a pair of launches for each dtype with a kernel.

    The rows are those of `fill_row`, except for the rounding of sums by another method. The host does not wait, and
    memory is bounded: more than 512 segments, or 33,554,432 elements, may take several pairs.

    Args:
        segments: Pairs of a tensor and its row. The tensor is [n >= 1], contiguous, of one of ROW_DTYPES. The row is
            float64 [ROW_VALUES] on the same device, and is overwritten. A tensor whose address is not a multiple of 16
            bytes takes a slower method.
    """
    for flat, row in fill_by_kernel(segments):
        fill_row(flat, row)


def _fill(flat: torch.Tensor, row: torch.Tensor) -> None:
    if has_codes(flat):
        fill_from_codes(flat, row)
    elif flat.is_cpu:
        fill_from_values(flat, row, blind=False)
    else:
        fill_on_device(flat, row)
