"""PyTorch's own products: nn.Linear, and F.scaled_dot_product_attention wherever a module calls it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from capd_client.function_sites import FunctionSite
from capd_client.integrations.callers import calls
from capd_client.kinds import ATTENTION, LINEAR
from capd_client.sites import Site

__all__ = ["SDPA", "find_sites"]


class _ScaledDotProductAttention(FunctionSite):
    def patches(self) -> list[tuple[Any, str]]:
        return [(functional, "scaled_dot_product_attention")]


SDPA = _ScaledDotProductAttention("attention", ATTENTION, ("query", "key", "value"))
"""Query, key and value as they are given: [..., heads, tokens, width], key and value before they are repeated."""

_LAYOUT = (("layout", "bhsd"),)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """The modules of `model` that compute F.linear(input, self.weight), and those that call attention."""
    found: dict[str, list[Site]] = {}
    for name, module in model.named_modules():
        if _is_linear(module):
            found[name] = [Site(module, LINEAR, ("input",))]
        elif calls(module.__class__, "scaled_dot_product_attention"):
            found[name] = [Site(module, ATTENTION, function=SDPA, attributes=_LAYOUT)]
    return found


def _is_linear(module: nn.Module) -> bool:
    """Subclasses count while they keep nn.Linear's forward (FSDP2 makes such classes).

    The quantised ones of other libraries bring their own, with packed weights. A parametrised weight is recomputed by
    every read, so reading it here could change the job's random numbers. nn.MultiheadAttention never calls its
    NonDynamicallyQuantizableLinear.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and not is_parametrized(module)
    )
