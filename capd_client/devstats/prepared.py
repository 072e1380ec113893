"""The Triton kernels of a device: compiled in another process, loaded when the job does not wait, tried before use.

A training thread never compiles and never waits. Until a dtype is ready, and if it never is, torch's operations do the
work. After any failure the device keeps using them, and the log reports the failure once.
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
"""A flat tensor, and the row for its statistics."""

# The dtypes of training, most frequent first.
_NATIVE = (torch.bfloat16, torch.float32, torch.float16)
_CODES = tuple(dtype for dtype in DTYPES if dtype.itemsize == 1 and str(dtype).startswith("torch.float"))
_LOOK_S = 0.05

# An entry means that the kernel may be used for the dtype on the device.
_tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
_launching: ModuleType


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel has passed its trial for tensors of `dtype` on `device`."""
    return (device, dtype) in _tables


def prepare(
    device: torch.device,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    dtypes: Optional[Iterable[torch.dtype]] = None,
    may_load: Callable[[], bool] = lambda: True,
    stream: Optional[torch.cuda.Stream] = None,
) -> None:
    """Prepare the kernels for `device` (with its index), dtype by dtype. Takes seconds or longer, never raises.

    For a background thread that keeps out of CUDA graph captures. It does nothing if Triton is not installed, or if it
    interprets the kernels of a job that is being debugged.

    Kernels that Triton's cache lacks are compiled first, in another process (`compiling`). Then each dtype waits for
    `may_load`. Loading a module holds the lock of the CUDA context until the GPU's queue has drained, and every launch
    of the job would wait for that. Triton itself is not imported earlier, either.

    Args:
        device: The GPU.
        cancelled: Called now and then; True means that the rest is no longer wanted.
        dtypes: The dtypes in order; dtypes without a kernel are skipped. None is all of them.
        may_load: Called now and then until it returns True. It should do so before the first step, so that cached
            kernels are ready for it, and again after the first steps.
        stream: The stream that will compute rows; the trial leaves its memory for them. None is a new one.
    """
    wanted = [*_NATIVE, *_CODES]
    if dtypes is not None:
        wanted = [dtype for dtype in dict.fromkeys(dtypes) if dtype in wanted]
    if not wanted or not installed():
        return
    try:
        if not _may_be_loaded(device, wanted, cancelled, may_load):
            return
        with _trial_stream(device, stream):
            for dtype in wanted:
                if not _may_be_loaded(device, [dtype], cancelled, may_load) or not _load(device):
                    return
                table = _table(dtype, device)
                compare(dtype, table, _launch)
                _tables[device, dtype] = table
    except Exception as error:
        _give_up(device, error)


def _may_be_loaded(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    cancelled: Callable[[], bool],
    may_load: Callable[[], bool],
) -> bool:
    """Wait until loading compiles nothing and the job may wait for it; return False if that never comes."""
    if device.type != "cuda":
        return _wait_for(may_load, cancelled)
    if interpreted():
        return False
    target, names = target_of(device), [_name(dtype) for dtype in dtypes]
    while compile_ahead(target, names, cancelled) and _wait_for(may_load, cancelled):
        # Inductor moves Triton's cache when it first runs, and earlier results are then in the old directory.
        if not missing(target, names):
            return True
    return False


def _load(device: torch.device) -> bool:
    """Import Triton, unless it is imported; return whether its launches run on the device."""
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
    """Write the row of a device tensor [n]: by the kernel if it is ready, else by torch's operations."""
    for _ in fill_by_kernel([(flat, row)]):
        fill_from_values(flat, row, blind=True)


def fill_by_kernel(segments: Sequence[Segment]) -> list[Segment]:
    """Write the rows for which a kernel is ready, by a launch for each dtype; return the other segments."""
    by_table: dict[tuple[torch.device, torch.dtype], list[Segment]] = {}
    rest = []
    for flat, row in segments:
        key = (flat.device, flat.dtype)
        if key in _tables and flat.numel() and flat.data_ptr() % _launching.ALIGNMENT == 0:
            by_table.setdefault(key, []).append((flat, row))
        else:
            rest.append((flat, row))
    for key, group in by_table.items():
        # None means that another group has failed meanwhile.
        table = _tables.get(key)
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
    # Triton launches on the current device, even if its arguments are on another one.
    with torch.cuda.device_of(segments[0][0]):  # type: ignore[no-untyped-call]
        _launching.fill_from_kernel(words, [row for _, row in segments], _name(dtype), table)


def _give_up(device: torch.device, error: Exception) -> None:
    for at in list(_tables):
        if at[0] == device:
            _tables.pop(at, None)
    logger.warning(
        "capd: statistics on %s continue with torch's own operations, because the Triton kernel failed: %s: %s",
        device,
        type(error).__name__,
        str(error)[:500],
    )


@contextlib.contextmanager
def _trial_stream(device: torch.device, stream: Optional[torch.cuda.Stream]) -> Iterator[None]:
    """Run the trial on its own stream, so that its work does not delay the job's kernels."""
    if device.type != "cuda":
        yield
        return
    used = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]  # torch's own lack
    with torch.cuda.stream(used):
        yield
    # Without a table nothing was loaded.
    if stream is None and _tables:
        _launching.forget(device, used.cuda_stream)


def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return float32 values by 8-bit code; an empty tensor for dtypes that Triton supports itself."""
    if dtype in _NATIVE:
        return torch.empty((0, 0), dtype=torch.float32, device=device)
    return values_of_codes(dtype, device).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
