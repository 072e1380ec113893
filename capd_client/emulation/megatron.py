"""Megatron-LM's products in another number format: parallel linears, and the unfused core attention.

The linears do not call F.linear. A function of their file gathers the sequence, multiplies, and reduces the ranks'
results in the backward. For an emulated layer this function is replaced by Megatron's own communication around an
emulated product. So the operands that are quantised are those of each rank's product, and include the whole
sequence. Core attention multiplies by torch.baddbmm and torch.bmm. They are intercepted only within its forward.

Not emulated:

- TransformerEngine's layers, which have their own recipes;
- the router;
- experts in one kernel (GroupedMLP);
- the weight gradient of an embedding whose computation Megatron defers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from capd_client.emulation.plans import EmulationPlan, calling
from capd_client.emulation.unfused import UnfusedProducts
from capd_client.integrations.megatron import LAYERS, LINEAR_FUNCTIONS
from capd_client.process.patching import patch

__all__ = ["attention_forward", "is_attention", "is_linear", "patch_linear_functions"]

_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_ATTENTION = "megatron.core.transformer.dot_product_attention"

Function = Callable[..., Any]


def is_linear(module: nn.Module) -> bool:
    """Whether this is one of Megatron's parallel linears."""
    return _is(module, LAYERS, "ColumnParallelLinear", "RowParallelLinear")


def is_attention(module: nn.Module) -> bool:
    """Whether this is Megatron's core attention without a fused kernel."""
    return _is(module, _ATTENTION, "DotProductAttention")


def _is(module: nn.Module, file: str, *names: str) -> bool:
    return any(base.__module__ == file and base.__name__ in names for base in type(module).__mro__)


def attention_forward(
    original: Function, plan: EmulationPlan, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of the core attention."""
    with UnfusedProducts(plan):
        return original(module, *args, **kwargs)


def patch_linear_functions() -> list[Callable[[], None]]:
    """Patch the functions that the linears multiply by. Returns the functions that undo the patches."""
    layers = sys.modules[LAYERS]
    return [patch(layers, name, _asking, innermost=True) for name in LINEAR_FUNCTIONS]


def _asking(function: Function) -> Function:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        plan = calling.linear
        if plan is None:
            return function(*args, **kwargs)
        return _multiply(plan, signature.bind(*args, **kwargs).arguments)

    return asking


def _multiply(plan: EmulationPlan, given: dict[str, Any]) -> Tensor:
    """Return the result of such a function for these arguments."""
    x, weight, bias = given["input"], given["weight"], given["bias"]
    mappings: Any = sys.modules[_MAPPINGS]
    if given["sequence_parallel"]:
        x = _in_group(mappings.gather_from_sequence_parallel_region, given)(x)
    elif given["allreduce_dgrad"]:
        x = _in_group(mappings.copy_to_tensor_model_parallel_region, given)(x)
    deferred, limit = given.get("grad_output_buffer"), given.get("wgrad_deferral_limit")
    if deferred is not None and (not limit or len(deferred) < limit):
        output = plan.multiply(x, weight.detach())
        output.register_hook(deferred.append)  # type: ignore[no-untyped-call]
    elif given["gradient_accumulation_fusion"] and weight.requires_grad:
        output = plan.multiply(x, _IntoMainGrad.apply(weight))  # type: ignore[no-untyped-call]
    else:
        output = plan.multiply(x, weight)
    return output if bias is None else output + bias


def _in_group(communicate: Callable[..., Tensor], given: dict[str, Any]) -> Callable[..., Tensor]:
    """Bind the communication to the group. Before 0.13 there is one group, and no argument names it."""
    group = given.get("tp_group")
    return communicate if group is None else functools.partial(communicate, group=group)


class _IntoMainGrad(torch.autograd.Function):
    """A weight whose gradient Megatron adds to its main_grad by its own kernel. Here torch adds it."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        ctx.weight, ctx.main_grad = weight, getattr(weight, "main_grad", None)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        weight = ctx.weight
        if hasattr(weight, "__fsdp_param__"):
            weight.main_grad = weight.get_main_grad()
            weight.main_grad.copy_(gradient)
        else:
            weight.main_grad = ctx.main_grad
            weight.main_grad.add_(gradient)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # The returned gradient is a placeholder, and nobody may add it.
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(gradient)
