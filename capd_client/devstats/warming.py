"""Runs the operations of a capture once, on tiny tensors, before a step would run them for the first time.

CUDA loads a kernel at its first launch, and that launch waits until the GPU's queue has drained.
"""

from __future__ import annotations

from itertools import permutations

import torch

from capd_client.devstats.formulas import fill_from_values
from capd_client.protocol.statistics_row import ROW_VALUES
from capd_client.tensors.inspect import DTYPES

__all__ = ["warm"]

_FLOATS = (torch.bfloat16, torch.float32, torch.float16)
_OTHERS = (torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
# Rows and columns. A copy of a matrix by columns, and one that starts at an odd offset, have their own kernels.
_ROWS, _COLUMNS = 16, 64


def warm(device: torch.device, *, rows: bool = False) -> None:
    """Run each kind of copy that captures make once, on the current stream. Nothing waits for the copies.

    Args:
        device: The device; the CPU has nothing to load, and just runs them.
        rows: Whether the device will compute statistics; then the operations of `formulas` run as well.
    """
    with torch.inference_mode(False), torch.no_grad():
        for dtype in (*_FLOATS, *_OTHERS):
            _copy(dtype, dtype, device)
        for source, target in permutations(_FLOATS, 2):
            _copy(source, target, device)
        if rows:
            _compute(device)


def _copy(source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    """Copy as a ring does: from any layout into contiguous memory."""
    matrix = torch.zeros((_ROWS + 1, _COLUMNS), dtype=source, device=device)
    whole, odd = matrix[:_ROWS], matrix.view(-1)[1 : 1 + _ROWS * _COLUMNS].view(_ROWS, _COLUMNS)
    for tensor in (whole, odd, whole.t(), whole[:, ::2], whole.view(4, 4, _COLUMNS).transpose(1, 2)):
        torch.empty(tensor.shape, dtype=target, device=device).copy_(tensor)


def _compute(device: torch.device) -> None:
    row = torch.empty(ROW_VALUES, dtype=torch.float64, device=device)
    for dtype in DTYPES:
        if dtype in (torch.int64, getattr(torch, "uint64", None)):
            continue
        codes = torch.zeros(_COLUMNS * dtype.itemsize, dtype=torch.uint8, device=device)
        fill_from_values(codes.view(dtype), row, blind=True)
