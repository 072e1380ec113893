"""The places of torch that an emulation puts its own functions into."""

from __future__ import annotations

from torch import nn
from torch.nn import functional
from torch.utils import checkpoint


def patched() -> list[object]:
    """The functions of torch that an emulation replaces, as they are now."""
    return [
        nn.Linear.forward,
        nn.MultiheadAttention.forward,
        functional.linear,
        functional.scaled_dot_product_attention,
        vars(nn.Module).get("__reduce_ex__"),
        checkpoint.CheckpointFunction.forward,
        checkpoint._checkpoint_without_reentrant_generator,
    ]
