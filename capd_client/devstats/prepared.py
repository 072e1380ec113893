"""The Triton kernels of a device: compiled beside the job, loaded when it does not wait for that, tried before use.

A training thread never compiles and never waits: until a dtype is ready, and wherever it is not, torch's operations
do the work. Whatever fails, the device stays with those, and the log says so once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Optional

import torch

from capd_client.devstats.compiling import compile_ahead, missing, target_of
from capd_client.devstats.formulas import fill_from_values
from capd_client.devstats.tables import values_of_codes
from capd_client.devstats.trial import compare
from capd_client.process.log import logger
from capd_client.rowkernel.artifacts import installed, interpreted
from capd_client.tensors.inspect import DTYPES

__all__ = ["Segment", "fill_by_kernel", "fill_on_device", "has_kernel", "prepare"]

Segment = tuple[torch.Tensor, torch.Tensor]
"""A flat tensor, and where its row goes."""

# What training is made of, most frequent first.
_NATIVE = (torch.bfloat16, torch.float32, torch.float16)
_CODES = tuple(dtype for dtype in DTYPES if dtype.itemsize == 1 and str(dtype).startswith("torch.float"))
_LOOK_S = 0.05

_tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}  # an entry: the kernel may be used for it
_launching: ModuleType


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel has proved itself for tensors of `dtype` on `device`."""
    return (device, dtype) in _tables


def prepare(
    device: torch.device,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    dtypes: Optional[Iterable[torch.dtype]] = None,
    may_load: Callable[[], bool] = lambda: True,
    stream: Optional[torch.cuda.Stream] = None,
) -> None:
    """Make the kernels for `device` (with its index) ready, dtype by dtype. Takes seconds or longer, never raises.

    For a background thread that keeps out of CUDA graph captures. Does nothing where Triton is not installed, or
    interprets the kernels of a job that is being debugged.

    What Triton's cache does not hold is compiled first, in another process (`compiling`). Then, for each dtype, it
    waits for `may_load`: loading a module takes the lock of the CUDA context until the GPU's queue has drained, and
    every launch of the job would wait for that. Triton itself is not imported earlier, either.

    Args:
        device: The GPU.
        cancelled: Asked now and then whether the rest is still wanted.
        dtypes: Which ones, the first one first; what has no kernel is passed over. None is all of them.
        may_load: Asked now and then until it is true: before the first step and after the first steps, so that what
            the cache holds at the start is ready for the first step.
        stream: Where rows will be computed; the trial then leaves its memory for them. None is one of its own.
    """
    wanted = [*_NATIVE, *_CODES]
    if dtypes is not None:
        wanted = [dtype for dtype in dict.fromkeys(dtypes) if dtype in wanted]
    if not wanted or not installed():
        return
    try:
        _prepare(device, wanted, cancelled, may_load, stream)
    except Exception as error:
        _give_up(device, error)


def _prepare(
    device: torch.device,
    wanted: Sequence[torch.dtype],
    cancelled: Callable[[], bool],
    may_load: Callable[[], bool],
    stream: Optional[torch.cuda.Stream],
) -> None:
    if not _may_be_loaded(device, wanted, cancelled, may_load):
        return
    with _trial_stream(device, stream):
        for dtype in wanted:
            if not _may_be_loaded(device, [dtype], cancelled, may_load) or not _load(device):
                return
            table = _table(dtype, device)
            compare(dtype, table, _launch)
            _tables[device, dtype] = table


def _may_be_loaded(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    cancelled: Callable[[], bool],
    may_load: Callable[[], bool],
) -> bool:
    """Wait until loading compiles nothing, and the job may wait for it. False: it never may."""
    if device.type != "cuda":
        return _wait_for(may_load, cancelled)
    if interpreted():
        return False
    target, names = target_of(device), [_name(dtype) for dtype in dtypes]
    while compile_ahead(target, names, cancelled) and _wait_for(may_load, cancelled):
        # Inductor moves Triton's cache when it first runs, and what was compiled lies in the old one then.
        if not missing(target, names):
            return True
    return False


def _load(device: torch.device) -> bool:
    """Import Triton, if no one has; whether its launches run on the device."""
    global _launching
    from capd_client.devstats import launching

    _launching = launching
    return device.type != "cuda" or bool(launching.COMPILED)


def _wait_for(condition: Callable[[], bool], cancelled: Callable[[], bool]) -> bool:
    while not cancelled():
        if condition():
            return True
        time.sleep(_LOOK_S)
    return False


def fill_on_device(flat: torch.Tensor, row: torch.Tensor) -> None:
    """Write the row of a device tensor [n]: by the kernel where it is ready, by torch's operations otherwise."""
    for _ in fill_by_kernel([(flat, row)]):
        fill_from_values(flat, row, blind=True)


def fill_by_kernel(segments: Sequence[Segment]) -> list[Segment]:
    """Write the rows that a kernel is ready for, by a launch for each dtype; returns the other segments."""
    by_table: dict[tuple[torch.device, torch.dtype], list[Segment]] = {}
    rest = []
    for flat, row in segments:
        key = (flat.device, flat.dtype)
        if key in _tables and flat.numel() and flat.data_ptr() % _launching.ALIGNMENT == 0:
            by_table.setdefault(key, []).append((flat, row))
        else:
            rest.append((flat, row))
    for key, group in by_table.items():
        table = _tables.get(key)  # None: another group has failed meanwhile
        try:
            if table is not None:
                _launch(key[1], group, table)
                continue
        except Exception as error:
            _give_up(key[0], error)
        rest += group
    return rest


def _launch(dtype: torch.dtype, segments: Sequence[Segment], table: torch.Tensor) -> None:
    words = [flat.view(torch.uint8) if table.numel() else flat for flat, _ in segments]
    # Triton launches on the current device, wherever its arguments are.
    with torch.cuda.device_of(segments[0][0]):  # type: ignore[no-untyped-call]
        _launching.fill_from_kernel(words, [row for _, row in segments], _name(dtype), table)


def _give_up(device: torch.device, error: Exception) -> None:
    for at in list(_tables):
        if at[0] == device:
            _tables.pop(at, None)
    logger.warning(
        "capd: statistics on %s go on with torch's own operations, the Triton kernel failed: %s: %s",
        device,
        type(error).__name__,
        str(error)[:500],
    )


@contextlib.contextmanager
def _trial_stream(device: torch.device, stream: Optional[torch.cuda.Stream]) -> Iterator[None]:
    """Work of the trial goes beside the job's streams, not between their kernels."""
    if device.type != "cuda":
        yield
        return
    used = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]  # torch's own lack
    with torch.cuda.stream(used):
        yield
    if stream is None and _tables:  # else nothing was loaded
        _launching.forget(device, used.cuda_stream)


def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """float32 values by 8-bit code; empty for dtypes that Triton knows itself."""
    if dtype in _NATIVE:
        return torch.empty((0, 0), dtype=torch.float32, device=device)
    return values_of_codes(dtype, device).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
