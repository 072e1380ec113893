"""The Triton kernel of a device: compiled and tried in the background, used for what it has proved itself on.

A training thread never compiles and never waits: until a dtype is ready, and wherever it is not, torch's operations
do the work. Whatever fails, the device stays with those, and the log says so once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import ModuleType

import torch

from capd_client.devstats.formulas import fill_from_values
from capd_client.devstats.tables import values_of_codes
from capd_client.notices import logger
from capd_client.statistics_row import ROW_VALUES
from capd_client.tensors import DTYPES

__all__ = ["fill_on_device", "has_kernel", "prepare"]

# What training is made of, most frequent first: each word size and format takes about half a second to compile.
_NATIVE = (torch.bfloat16, torch.float32, torch.float16)
_CODES = tuple(dtype for dtype in DTYPES if dtype.itemsize == 1 and str(dtype).startswith("torch.float"))
_SAMPLE = 4099  # elements of the trial: several blocks and a rest
_MIXED = 2654435761  # Knuth's multiplicative hash: spreads 0, 1, 2, … over all bit patterns
_TRIAL_S = 30.0  # a device that is busy for longer is tried no further

_tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}  # an entry: the kernel may be used for it
_kernel: ModuleType


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel has proved itself for tensors of `dtype` on `device`."""
    return (device, dtype) in _tables


def prepare(device: torch.device, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Compile the kernel for `device` (with its index) and try it, dtype by dtype. Takes seconds, never raises.

    For a background thread that keeps out of CUDA graph captures. Does nothing where Triton is not installed, or
    interprets the kernels of a job that is being debugged.
    cancelled: asked between dtypes whether the rest is still wanted.
    """
    global _kernel
    try:
        from capd_client.devstats import kernel
    except ImportError:
        return
    except Exception as error:
        _give_up(device, error)
        return
    if device.type == "cuda" and not kernel.COMPILED:
        return
    _kernel = kernel
    try:
        with _stream_of_its_own(device):
            for dtype in (*_NATIVE, *_CODES):
                if cancelled():
                    return
                table = _table(dtype, device)
                _try(dtype, table)
                _tables[device, dtype] = table
    except Exception as error:
        _give_up(device, error)


def fill_on_device(flat: torch.Tensor, row: torch.Tensor) -> None:
    """Write the row of a device tensor [n]: by the kernel where it is ready, by torch's operations otherwise."""
    table = _tables.get((flat.device, flat.dtype))
    if table is not None and flat.numel() and flat.data_ptr() % _kernel.ALIGNMENT == 0:
        try:
            _launch(flat, table, row)
            return
        except Exception as error:
            _give_up(flat.device, error)
    fill_from_values(flat, row, blind=True)


def _launch(flat: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
    # Triton launches on the current device, wherever its arguments are.
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        _kernel.fill_from_kernel(flat.view(torch.uint8) if table.numel() else flat, table, row)


def _give_up(device: torch.device, error: Exception) -> None:
    for at in list(_tables):
        if at[0] == device:
            del _tables[at]
    logger.warning(
        "capd: statistics on %s go on with torch's own operations, the Triton kernel failed: %s: %s",
        device,
        type(error).__name__,
        str(error)[:500],
    )


def _stream_of_its_own(device: torch.device) -> torch.cuda.StreamContext:
    """Work of the trial goes beside the job's streams, not between their kernels."""
    return torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None)  # type: ignore[no-untyped-call]  # torch's own lack


def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """float32 values by 8-bit code; empty for dtypes that Triton knows itself."""
    if dtype in _NATIVE:
        return torch.empty((0, 0), dtype=torch.float32, device=device)
    return values_of_codes(dtype, device).contiguous()


def _try(dtype: torch.dtype, table: torch.Tensor) -> None:
    """Compare the kernel with torch's operations on all kinds of bit patterns; raises where they differ."""
    device = table.device
    patterns = torch.arange(_SAMPLE * dtype.itemsize, dtype=torch.int64, device=device).mul_(_MIXED)
    flat = patterns.bitwise_right_shift(16).to(torch.uint8).view(dtype)
    rows = torch.empty((2, ROW_VALUES), dtype=torch.float64, device=device)
    fill_from_values(flat, rows[0], blind=True)
    _launch(flat, table, rows[1])
    expected, found = _on_host(rows).tolist()
    slack = 1e-10 * math.sqrt(expected[0] * expected[8])  # sum |x| is below sqrt(n sum x²)
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        allowed = slack if index == 7 else 1e-10 * a if index == 8 else 0.0
        if not (abs(a - b) <= allowed or (a != a and b != b)):
            raise ArithmeticError(f"number {index} of a row of {dtype} is {b!r}, not {a!r}")


def _on_host(rows: torch.Tensor) -> torch.Tensor:
    """The rows, once they are computed; asks for it now and then, as the host may be forbidden to wait."""
    if rows.is_cpu:
        return rows
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own lack
    host = rows.to("cpu", non_blocking=True)
    done.record()
    deadline = time.monotonic() + _TRIAL_S
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{rows.device} did not finish within {_TRIAL_S:.0f} s")
        time.sleep(0.001)
    return host
