"""PyTorch's own products: nn.Linear, and F.scaled_dot_product_attention wherever a module calls it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.sites import Site
from capd_client.integrations.attention_facts import of_sdpa
from capd_client.integrations.callers import calls, importers_of
from capd_client.integrations.linears import is_plain
from capd_client.integrations.multihead import linears_of
from capd_client.protocol.kinds import ATTENTION, LINEAR

__all__ = ["SDPA", "find_sites"]


def _places() -> list[tuple[Any, str]]:
    """Return torch's function and the job's modules that imported it by `from torch.nn.functional import ...`."""
    name = "scaled_dot_product_attention"
    return [(functional, name), *importers_of(getattr(functional, name))]


SDPA = FunctionSite("attention", ATTENTION, ("query", "key", "value"), _places)
"""The attention function. Operands are [..., heads, tokens, width], key and value before they are repeated."""

_LAYOUT = (("layout", "bhsd"),)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the plain linears of `model` and the modules that call attention, by their qualified names."""
    found: dict[str, list[Site]] = {}
    decoders = [module for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer)]
    crossing = {id(decoder.multihead_attn) for decoder in decoders}
    for name, module in model.named_modules():
        if is_plain(module):
            found[name] = [Site(module, LINEAR, ("input",))]
        elif calls(module.__class__, "scaled_dot_product_attention"):
            found[name] = [_attention(module)]
        elif calls(module.__class__, "multi_head_attention_forward"):
            packed_as = ("in_proj_q", "in_proj_kv") if id(module) in crossing else ("in_proj",)
            sites = linears_of(module, packed_as)
            found[name] = [_attention(module), *sites]
    return found


def _attention(module: nn.Module) -> Site:
    return Site(module, ATTENTION, function=SDPA, attributes=_LAYOUT, describe=of_sdpa)
