"""The table of adapters: which modules are emulated, and how.

There is one adapter for each way in which modules multiply.

To add one, append an Adapter to ADAPTERS. This file imports no framework.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Optional

from torch import nn
from torch.compiler import is_compiling

from capd_client.emulation import megatron, transformers
from capd_client.emulation.functions import patch_attention, patch_linear, patch_multihead, within
from capd_client.emulation.plans import EmulationPlan
from capd_client.emulation.quantise import DTYPES
from capd_client.hooks.sites import operands_of
from capd_client.integrations.callers import calls, names_in
from capd_client.integrations.linears import calls_linear, is_linear
from capd_client.integrations.megatron import is_one_kernel
from capd_client.integrations.transformers import is_attention
from capd_client.integrations.transformers_experts import is_experts
from capd_client.process.log import RateLimitedLog

__all__ = ["ADAPTERS", "Adapter", "adapter_of", "reason_to_leave"]

Forward = Callable[..., Any]
_MULTIHEAD = ("query", "key", "value", "key_padding_mask", "need_weights")
_WEIGHTS_ASKED = (
    "attention that returns its weights (need_weights=True, the default of nn.MultiheadAttention) is not emulated; "
    "only its linears are"
)
_notices = RateLimitedLog()
_TE_PRODUCT = re.compile("Linear|MLP|DotProductAttention")
_LINEAR = frozenset({"linear"})
_ATTENTION = frozenset({"qk", "pv"})


class Adapter(NamedTuple):
    """A way in which modules multiply.

    Attributes:
        name: The name in messages.
        parts: The parts of a recipe that it emulates. A recipe without any of them leaves the module alone.
        matches: Whether it is for this module. The first match in ADAPTERS counts.
        forward: Called as forward(original, plan, module, *args, **kwargs) instead of the class's own `forward`.
            `original` is that forward, called as original(module, *args, **kwargs). The products come from the plan
            (`EmulationPlan.multiply`, `scores`, `weighted`, `attend`). torch.compile traces this function.
        patches: Patches functions that the forward calls, while such a module is emulated. Returns the undo
            functions.
    """

    name: str
    parts: frozenset[str]
    matches: Callable[[nn.Module], bool]
    forward: Forward
    patches: Optional[Callable[[], Iterable[Callable[[], None]]]] = None


def _plain_linear(original: Forward, plan: EmulationPlan, module: Any, input: Any) -> Any:  # noqa: A002  # as nn.Linear's own
    return plan.multiply(input, module.weight, module.bias)


def _calling_linear(original: Forward, plan: EmulationPlan, module: Any, *args: Any, **kwargs: Any) -> Any:
    return within(None, plan, original, module, *args, **kwargs)


def _calling_attention(original: Forward, plan: EmulationPlan, module: Any, *args: Any, **kwargs: Any) -> Any:
    return within(plan, None, original, module, *args, **kwargs)


def _multihead(original: Forward, plan: EmulationPlan, module: Any, *args: Any, **kwargs: Any) -> Any:
    attention = plan if plan.qk or plan.pv else None
    if attention is not None and not is_compiling() and operands_of(_MULTIHEAD, args, kwargs)[4] is not False:
        _notices.warn("need_weights", _WEIGHTS_ASKED)
    return within(attention, plan if plan.linear else None, original, module, *args, **kwargs)


def _is_plain(module: nn.Module) -> bool:
    return is_linear(module) and type(module).forward is nn.Linear.forward


def _calling(name: str) -> Callable[[Any], bool]:
    """Return a function that says whether a module's class calls the function of this name."""
    return lambda module: calls(module.__class__, name)


ADAPTERS: list[Adapter] = [
    Adapter(
        "Megatron's linears", _LINEAR, megatron.is_linear, _calling_linear, megatron.patch_linear_functions
    ),
    Adapter("Megatron's core attention", _ATTENTION, megatron.is_attention, megatron.attention_forward),
    Adapter("transformers' Conv1D", _LINEAR, transformers.is_conv1d, transformers.conv1d_forward),
    Adapter(
        "transformers' attention", _ATTENTION, is_attention, _calling_attention,
        transformers.patch_attentions,
    ),
    Adapter("nn.Linear", _LINEAR, _is_plain, _plain_linear),
    Adapter("F.linear", _LINEAR, calls_linear, _calling_linear, patch_linear),
    Adapter(
        "nn.MultiheadAttention", _LINEAR | _ATTENTION,
        _calling("multi_head_attention_forward"), _multihead, patch_multihead,
    ),
    Adapter(
        "F.scaled_dot_product_attention", _ATTENTION,
        _calling("scaled_dot_product_attention"), _calling_attention, patch_attention,
    ),
]  # fmt: skip
"""The adapters, the most specific first."""


def _is_of_transformer_engine(module: nn.Module) -> bool:
    kinds = ((base.__module__, base.__name__) for base in type(module).__mro__)
    return any(file.startswith("transformer_engine.") and _TE_PRODUCT.search(name) for file, name in kinds)


def _reason_of_unknown(module: nn.Module) -> str:
    """Return why a module without an adapter is not emulated. "" if nothing shows that it multiplies."""
    if is_one_kernel(module):
        return "one kernel multiplies all its experts"
    if is_experts(module):
        return "its experts are parts of one parameter"
    if isinstance(module, nn.Linear):
        return "it multiplies in its own way" if is_linear(module) else ""
    # `self.linear(x)` calls a module.
    names = names_in(type(module).forward) - module._modules.keys()
    weights = [weight for weight in module._parameters.values() if weight is not None and weight.ndim > 1]
    return "it calls F.linear with its own weight" if weights and "linear" in names else ""


def adapter_of(module: nn.Module) -> Optional[Adapter]:
    """Return the first adapter that matches the module."""
    return next((adapter for adapter in ADAPTERS if adapter.matches(module)), None)


def reason_to_leave(module: nn.Module, adapter: Optional[Adapter], parts: Collection[str]) -> str:
    """Return why a module that multiplies is not emulated.

    "" if it is emulated, or if it has no product of these parts of a recipe.
    """
    if adapter is None and _is_of_transformer_engine(module):
        return "TransformerEngine has its own recipes"
    if adapter is None:
        return _reason_of_unknown(module) if "linear" in parts else ""
    if "forward" in vars(module):
        return "it has its own forward on the instance"
    kernel = transformers.attention_kernel(module) if is_attention(module) else ""
    if kernel:
        return f"{kernel} is one kernel"
    weight = module._parameters.get("weight") if "linear" in adapter.parts else None
    if weight is None:
        return ""
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    whole = distributed is None or not isinstance(weight, distributed.DTensor)
    if whole and hasattr(weight, "__tensor_flatten__"):
        return f"its weight is a {type(weight).__name__}"
    return ""
