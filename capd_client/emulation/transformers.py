"""Hugging Face transformers' products: GPT-2's Conv1D, and attention by sdpa or eager.

An attention module asks for the function that its configuration names. sdpa is emulated at torch's function, and
eager in the function of the model's file. Other functions (flash_attention_*, flex_attention) are left unchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from capd_client.emulation.functions import patch_attention, within
from capd_client.emulation.plans import EmulationPlan, calling
from capd_client.emulation.unfused import UnfusedProducts
from capd_client.process.patching import patch

__all__ = [
    "attention_kernel",
    "conv1d_forward",
    "is_conv1d",
    "patch_attentions",
]

_EAGER = "eager_attention_forward"

Function = Callable[..., Any]


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a linear whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def conv1d_forward(original: Function, plan: EmulationPlan, module: Any, x: Tensor) -> Tensor:
    """Run the forward of a Conv1D."""
    return plan.multiply(x, module.weight.t(), module.bias)


def attention_kernel(module: nn.Module) -> str:
    """Return the fused kernel that the module's configuration names, in which nothing can be emulated.

    "" for none.
    """
    name = str(getattr(getattr(module, "config", None), "_attn_implementation", None) or "")
    return name if "flash" in name or "flex" in name else ""


def patch_attentions() -> list[Callable[[], None]]:
    """Patch the functions that such modules may call. Returns the functions that undo the patches."""
    eager = [
        patch(file, name, _eager, innermost=True)
        for file in list(sys.modules.values())
        if isinstance(file, ModuleType)
        for name in list(vars(file))
        if name.endswith(_EAGER) and callable(vars(file)[name])
    ]
    return [*patch_attention(), *eager]


@functools.lru_cache(maxsize=256)
def _eager(function: Function) -> Function:
    @functools.wraps(function)
    def eager(*args: Any, **kwargs: Any) -> Any:
        plan = calling.attention
        if plan is None:
            return function(*args, **kwargs)
        with UnfusedProducts(plan):
            return within(None, None, function, *args, **kwargs)

    return eager
