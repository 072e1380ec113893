"""Layers that have recipes of their own, or one kernel for many products, are left alone, and that is said."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import capd_client


def of_library(name: str, file: str) -> nn.Module:
    kind: Any = type(name, (nn.Module,), {"__module__": file})
    module: nn.Module = kind()
    module.weight = nn.Parameter(torch.ones(2, 2))
    return module


def test_layers_of_transformer_engine_are_left_alone_and_named() -> None:
    model = nn.ModuleDict(
        {
            "fused": of_library("LayerNormLinear", "transformer_engine.pytorch.module.layernorm_linear"),
            "attention": of_library("DotProductAttention", "transformer_engine.pytorch.attention"),
            "norm": of_library("LayerNorm", "transformer_engine.pytorch.module.layernorm"),
            "head": nn.Linear(4, 2),
        }
    )
    emulation = capd_client.emulate(model, "mxfp8")

    assert emulation.modules == ("head",)
    reason = "TransformerEngine has its own recipes"
    assert dict(emulation.left_alone) == {"fused": reason, "attention": reason}
    emulation.remove()
