"""Statistics computed in the rank, where the tensor lies: one pass, no payload on the link, nothing waits.

`fill_row` writes the row of `capd_client.protocol.statistics_row` on the tensor's own device, by operations of the
current
stream alone: no host synchronisation, temporary memory bounded by one block. `fill_rows` writes many at once. What the
fields mean, and how exact each way is: docs/statistics.md. The ways:

- the CPU, 8-bit dtypes and large 16-bit tensors: one histogram of the bit patterns, the rest by table (`codes`);
- a GPU for which `prepare` has run: a Triton kernel (`launching`, imported by `prepare` alone);
- everything else: torch's own operations, block by block (`formulas`).
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
"""The dtypes of this torch that a rank can compute a row of."""


def fill_row(tensor: torch.Tensor, row: torch.Tensor, dtype: Optional[torch.dtype] = None) -> None:
    """Write the statistics of `tensor` into `row`, on the current stream.

    tensor: plain and strided, on the CPU or a CUDA device. row: float64 [ROW_VALUES] on the same device, contiguous;
    what it held before is overwritten. dtype: one of ROW_DTYPES, to which the tensor is cast; None is its own.
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

    As `fill_row` for each of them, with the same rows, but for the rounding of sums where the way is another. The host
    does not wait, and memory is bounded: more than 512 segments, or 33,554,432 elements, may take several pairs.

    Args:
        segments: Each a tensor [n >= 1], contiguous, of one of ROW_DTYPES, and its row, float64 [ROW_VALUES] on the
            same device, which is overwritten. What begins off a multiple of 16 bytes takes the slower way.
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
