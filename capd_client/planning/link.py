"""The speed of captures on their way out of the tensors' memory: the configured speed, else that of one small copy."""

from __future__ import annotations

import timeit
from collections.abc import Collection
from functools import partial
from typing import Optional

import torch

__all__ = ["link_of"]

_NBYTES = 64 << 20
_ROUNDS = 3


def link_of(devices: Collection[torch.device], max_d2h_gbps: Optional[float]) -> tuple[Optional[float], str]:
    """Return the bytes per second of one rank, and the origin of this number.

    Returns:
        (None, the reason) if it cannot be measured.
    """
    if devices and max_d2h_gbps is not None:
        return max_d2h_gbps * 1e9, "max_d2h_gbps"
    try:
        if devices:
            return _from_device(min(devices, key=str)), "device to pinned memory, measured"
        return _on_host(), "copy in memory, measured"
    except (RuntimeError, MemoryError) as error:
        return None, f"not measured: {str(error).splitlines()[0]}"


def _from_device(device: torch.device) -> float:
    nbytes = min(_NBYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        host.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    torch.cuda.synchronize(device)
    return nbytes / min(timeit.repeat(copy, number=1, repeat=_ROUNDS))


def _on_host() -> float:
    """Measure a copy in memory. It uses one thread and existing pages, as a capture does."""
    source, target = memoryview(bytearray(_NBYTES)), memoryview(bytearray(_NBYTES))
    copy = partial(target.__setitem__, slice(None), source)
    return _NBYTES / min(timeit.repeat(copy, number=1, repeat=_ROUNDS))
