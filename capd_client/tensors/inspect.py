"""Inspects a tensor before its capture: unwraps it, or says why capd does not keep it.

capd keeps plain, strided tensors on the CPU or a CUDA device, if they have memory. This module also detects freed
storages: FSDP's `resize_(0)` leaves a tensor without memory, and reading it would end the job.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Optional

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import MAX_NDIM

__all__ = [
    "DEVICES",
    "DTYPES",
    "PLAIN_TYPES",
    "is_pending",
    "is_tracing",
    "local_part",
    "modes_active",
    "problem_of",
    "selectively_checkpointed",
    "unwrap",
    "without_modes",
    "without_single_value",
]

DTYPES: dict[torch.dtype, int] = {
    dtype: nbytes for name, nbytes in ITEM_NBYTES.items() if (dtype := getattr(torch, name, None)) is not None
}
"""The dtypes of this torch that capd keeps, with their bytes per element."""

PLAIN_TYPES: frozenset[type] = frozenset(
    kind for kind in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", None)) if kind is not None
)

DEVICES = frozenset({"cpu", "cuda"})
"""The types of the devices whose tensors capd keeps."""

is_tracing = torch._C._is_tracing
"""Whether torch.jit.trace is recording this thread."""


def modes_active() -> bool:
    """Whether a torch function mode, a dispatch mode, or torch.jit.trace would see our own operations."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or is_tracing())


def without_modes() -> AbstractContextManager[Any]:
    """Hide our operations from modes and subclasses: flop counters, default devices, selective checkpointing.

    torch.jit.trace does not see them either: a trace would hold our memory, and write to it whenever it runs.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    # In compiled graphs torch excludes tracing, and setting its state is an error there.
    if is_tracing():
        trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]  # not in its stubs
        stack.callback(trace, torch._C._get_tracing_state())
        trace(None)
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    return stack


def unwrap(value: Any) -> tuple[Optional[torch.Tensor], str]:
    """Return the plain tensor of a subclass on this rank, or None and the reason.

    A DTensor is unwrapped to its local shard. A pending collective is waited for, as its next user would do (see
    `is_pending`).
    """
    if not isinstance(value, torch.Tensor):
        return None, f"a {type(value).__name__} is not a torch tensor"
    tensor: Any = value
    for _ in range(3):
        name = type(tensor).__name__
        if name == "DTensor":
            tensor = tensor._local_tensor
        elif name == "AsyncCollectiveTensor":
            tensor = tensor.wait()
        else:
            break
    if type(tensor) in PLAIN_TYPES:
        return tensor, ""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    name = type(tensor).__name__
    if name == "FakeTensor" or is_traceable_wrapper_subclass(tensor):
        return None, f"{name} has no plain bytes of its own"
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
    return (plain, "") if type(plain) in PLAIN_TYPES else (None, f"{name} is not kept")


def is_pending(tensor: Any) -> bool:
    """Whether a collective is still filling this tensor."""
    return type(local_part(tensor)).__name__ == "AsyncCollectiveTensor"


def without_single_value(tensor: Any) -> str:
    """Return why no rank alone knows the value of this tensor of one element, or the empty string."""
    if type(tensor).__name__ == "DTensor" and not all(one.is_replicate() for one in tensor.placements):
        return "a DTensor that is not replicated has no single value without a collective; pass full_tensor()"
    if is_pending(tensor):
        return "a collective is still filling it; wait for it first"
    return ""


def selectively_checkpointed() -> bool:
    """Whether selective checkpointing sees our operations, or those that the job runs next."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    modes = tuple(getattr(checkpoint, name, type(None)) for name in names)
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())


def local_part(tensor: Any) -> Any:
    """Return the shard that a DTensor holds on this rank, outside autograd; any other value unchanged."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor


def problem_of(tensor: torch.Tensor) -> str:
    """Return why this plain tensor cannot be captured, or the empty string."""
    if tensor.is_nested:
        return "nested tensors are not kept"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} is not kept, dense tensors only"
    if tensor.dtype not in DTYPES:
        return f"dtype {tensor.dtype} is not kept"
    if tensor.device.type not in DEVICES:
        return f"device {tensor.device.type} is not supported"
    if tensor.ndim > MAX_NDIM:
        return f"{tensor.ndim} dimensions, the limit is {MAX_NDIM}"
    if tensor.numel():
        try:
            present = tensor.untyped_storage().nbytes()
        except (RuntimeError, NotImplementedError):
            return "it has no storage (a functional or transformed tensor)"
        if present < _needed_nbytes(tensor):
            return "its storage was freed"
    return ""


def _needed_nbytes(tensor: torch.Tensor) -> int:
    last = tensor.storage_offset()
    if tensor.is_contiguous():
        last += tensor.numel()
    else:
        last += 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return int(last) * tensor.element_size()
