"""torchtitan's attentions that do not call F.scaled_dot_product_attention: FlexAttention and VarlenAttention.

Their modules take query, key and value first, as [batch, tokens, heads, width], for every kernel. The output has
the same layout. Under tensor parallelism the captured tensors are the shards of heads that the kernel receives.
"""

from __future__ import annotations

import inspect

from torch import nn

from capd_client.hooks.sites import Site
from capd_client.protocol.kinds import ATTENTION

__all__ = ["find_sites"]

_ATTENTIONS = ("FlexAttention", "VarlenAttention")
_LAYOUT = (("layout", "bshd"),)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the attentions of torchtitan in `model`, by their qualified names."""
    return {
        name: [Site(module, ATTENTION, _first_arguments(type(module)), attributes=_LAYOUT)]
        for name, module in model.named_modules()
        if any(
            base.__name__ in _ATTENTIONS and base.__module__.startswith("torchtitan.")
            for base in type(module).__mro__
        )
    }


def _first_arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names that the class's forward gives query, key and value."""
    return tuple(inspect.signature(kind.forward).parameters)[1:4]
