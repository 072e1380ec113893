"""Finds torch's facts about one matrix product: its compute dtype, and the tensor that carries its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from capd_client.tensors.inspect import DEVICES, selectively_checkpointed, without_modes

__all__ = ["alias_of", "autocast_dtype", "hang", "hangs_on", "product_dtype", "product_of"]


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """Return the dtype in which autocast computes matrix products now; None if it is off, or unknown (meta)."""
    enabled = device_type in DEVICES and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def product_dtype(operand: Tensor, autocast: Optional[torch.dtype]) -> Optional[torch.dtype]:
    """Return the dtype to which autocast casts `operand` in a matrix product; None if it does not cast."""
    if not operand.is_floating_point() or operand.dtype is torch.float64:
        return None
    return None if autocast is operand.dtype else autocast


def product_of(output: Tensor) -> Tensor:
    """Return the tensor that the product itself made. `output` is a view of it if the input had a batch.

    A hook on that view would be lost, because an in-place change of a view moves it in the graph. If the view reorders
    elements, as attention's output does, the view itself is returned; its gradient has the same order.
    """
    base: Optional[Tensor] = output._base
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


def alias_of(tensor: Tensor) -> Tensor:
    """Return `tensor` as a view with its own gradient.

    Selective checkpointing finds what its first pass saved by counting operations, and must not count this one. A tap
    could be removed, or start to capture something else, before the second pass.
    """
    if not selectively_checkpointed():
        return tensor.view_as(tensor)
    with without_modes():
        return tensor.view_as(tensor)


def hang(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` with the gradient of `tensor`; return the handle that removes it."""
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own lack
    return handle


def hangs_on(handle: RemovableHandle, tensor: Tensor) -> bool:
    """Whether `hang` returned `handle` for this tensor. A weak reference would do, but swap_tensors refuses it."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and hooks is tensor._backward_hooks
