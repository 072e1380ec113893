"""torchtitan's attentions that do not call F.scaled_dot_product_attention: FlexAttention and VarlenAttention.

Whatever kernel is inside, their modules take query, key and value first, [batch, tokens, heads, width], and return the
output so; under tensor parallelism the shards of heads that the kernel gets.
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
    """The attentions of torchtitan in `model`, by their qualified names."""
    return {
        name: [Site(module, ATTENTION, _first_arguments(type(module)), attributes=_LAYOUT)]
        for name, module in model.named_modules()
        if any(
            base.__name__ in _ATTENTIONS and base.__module__.startswith("torchtitan.")
            for base in type(module).__mro__
        )
    }


def _first_arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """What its forward calls query, key and value."""
    return tuple(inspect.signature(kind.forward).parameters)[1:4]
