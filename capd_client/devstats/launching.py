"""Launches the kernels of rows: two launches for all segments of a dtype. Importing this module imports Triton.

Device memory comes from a pool per stream and returns to it right after the launches. Later launches of the same stream
overwrite it in the stream's order. Nothing is allocated twice, because under deterministic algorithms each allocation
costs a fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from capd_client.devstats.segments import TASKS, SegmentTable, batches, task_of
from capd_client.protocol.statistics_row import ROW_VALUES
from capd_client.rowkernel import kernels
from capd_client.rowkernel.artifacts import COLUMNS

__all__ = ["ALIGNMENT", "COMPILED", "fill_from_kernel", "forget"]

# Bytes that the kernel reads at once.
ALIGNMENT = 16
COMPILED = kernels.COMPILED


@dataclass(eq=False)
class _Scratch:
    """The device memory of one launch: the table of segments and the partial rows."""

    table: SegmentTable
    parts: torch.Tensor


# Read and written without a lock, because a signal handler may capture, too.
_scratch: dict[tuple[torch.device, int], list[_Scratch]] = {}


def fill_from_kernel(
    words: list[torch.Tensor], rows: list[torch.Tensor], dtype: str, table: torch.Tensor
) -> None:
    """Write the rows of `words`, on the current device and stream.

    Args:
        words: Each [n > 0], at a multiple of ALIGNMENT, all on one device: numbers, or uint8 codes.
        rows: As many rows, float64 [ROW_VALUES].
        dtype: Torch's name of the dtype that the words represent.
        table: float32 [256, 1] or [256, 2], the values of 8-bit codes; [0, 0] if the words are numbers.
    """
    tasks = (task_of(flat, row) for flat, row in zip(words, rows, strict=True))
    device = table.device
    key = (device, _stream(device))
    free = _scratch.setdefault(key, [])
    try:
        scratch = free.pop()
    except IndexError:
        scratch = _new_scratch(device)
    for batch, count in batches(tasks):
        scratch.table.send(batch)
        kernels.partial_rows[(count,)](
            scratch.table.on_device,
            table,
            scratch.parts,
            len(batch),
            **kernels.partial_constants(dtype),
            **kernels.OPTIONS,
        )
        kernels.merged_rows[(-(-ROW_VALUES // COLUMNS), len(batch))](
            scratch.table.on_device, scratch.parts, len(batch), **kernels.merge_constants(), **kernels.OPTIONS
        )
    free.append(scratch)


def forget(device: torch.device, stream: int) -> None:
    """Free the memory of a stream, by its number, that computes no more rows."""
    _scratch.pop((device, stream), None)


def _new_scratch(device: torch.device) -> _Scratch:
    # Outside inference mode, no one could write to an inference tensor.
    with torch.inference_mode(False):
        parts = torch.empty(TASKS * ROW_VALUES, dtype=torch.float64, device=device)
    return _Scratch(SegmentTable(device), parts)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
