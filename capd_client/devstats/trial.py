"""The trial of a device's kernel: for all kinds of bit patterns, its rows must equal those of torch's operations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from capd_client.devstats.formulas import fill_from_values
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = ["Launch", "compare"]

Launch = Callable[[torch.dtype, Sequence[tuple[torch.Tensor, torch.Tensor]], torch.Tensor], None]
"""Makes the kernel write the rows of segments; the last argument is the table of the dtype's values."""

# Elements: fewer than a thread reads at once, a whole block, blocks and a rest, several tasks that are merged.
_SIZES = (1, 7, 4096, 4099, 69636, 32768)
# Small slots of a ring are aligned to this many bytes.
_SLOT = 64
# Knuth's multiplicative hash spreads 0, 1, 2, … over all bit patterns.
_MIXED = 2654435761
# The trial ends if the device is busy for longer.
_TRIAL_S = 30.0


def compare(dtype: torch.dtype, table: torch.Tensor, launch: Launch) -> None:
    """Compare the results of two consecutive launches with those of torch's operations.

    Args:
        dtype: The dtype of the segments.
        table: The values of its codes, on the device.
        launch: Computes on the current stream.

    Raises:
        ArithmeticError: The rows differ.
        TimeoutError: The device did not finish in time.
    """
    flats = _samples(dtype, table.device)
    rows = torch.empty((2, len(flats), ROW_VALUES), dtype=torch.float64, device=table.device)
    for flat, row in zip(flats, rows[0], strict=True):
        fill_from_values(flat, row, blind=True)
    segments = list(zip(flats, rows[1], strict=True))
    launch(dtype, segments[::2], table)
    # The second launch must find its own table, not the first one's.
    launch(dtype, segments[1::2], table)
    expected, found = _on_host(rows).tolist()
    for n, pair in enumerate(zip(expected, found, strict=True)):
        _compare_rows(*pair, f"of {flats[n].numel()} elements of {dtype}")


def _samples(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    nbytes = [size * dtype.itemsize for size in _SIZES]
    starts = [0]
    for length in nbytes:
        starts.append(starts[-1] + -(-length // _SLOT) * _SLOT)
    patterns = torch.arange(starts[-1], dtype=torch.int64, device=device).mul_(_MIXED)
    flat = patterns.bitwise_right_shift(16).to(torch.uint8)
    return [flat[start : start + length].view(dtype) for start, length in zip(starts, nbytes, strict=False)]


def _compare_rows(expected: list[float], found: list[float], what: str) -> None:
    # sum |x| is below sqrt(n sum x²).
    slack = 1e-10 * math.sqrt(expected[0] * expected[8])
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        allowed = slack if index == 7 else 1e-10 * a if index == 8 else 0.0
        if not (abs(a - b) <= allowed or (a != a and b != b)):
            raise ArithmeticError(f"number {index} of a row {what} is {b!r}, not {a!r}")


def _on_host(rows: torch.Tensor) -> torch.Tensor:
    """Return the computed rows on the host. The host polls, because it may be forbidden to wait."""
    if rows.is_cpu:
        return rows
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own lack
    host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
    # A copy into memory that is not page-locked would wait, and hold the driver's lock.
    host.copy_(rows, non_blocking=True)
    done.record()
    deadline = time.monotonic() + _TRIAL_S
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{rows.device} did not finish within {_TRIAL_S:.0f} s")
        time.sleep(0.001)
    return host
