"""Tensor files as tensor_saver's users have them."""

from __future__ import annotations

from typing import Any

import torch

SEED_METADATA: dict[str, Any] = {
    "layer_type": "linear", "operation": "forward", "quant_type": "mxfp8", "tensor_name": "input", "layer_idx": 1,
    "phase": "pre", "component": "linear", "rank": 3, "sample_idx": 4, "iteration": 5,
    "save_time": "2025-09-08 09:52:20", "experiment": "test_run",
}  # fmt: skip
SEED_NAME = "20250908_095220_0001_iter005_linear_L1_forward_pre_linear_mxfp8_rank3_sample4_input.pt"


def seed_dictionary(tensor: torch.Tensor, **metadata: Any) -> dict[str, Any]:
    """What tensor_saver saved for `tensor`; a metadata value of None leaves the field out."""
    values = {**SEED_METADATA, **metadata}
    return {
        "tensor": tensor,
        "tensor_info": {
            "shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": "cuda:3", "requires_grad": True,
            "is_leaf": False, "min": 0.0, "max": 0.0, "mean": 0.0, "std": 0.0,
        },
        "metadata": {name: value for name, value in values.items() if value is not None},
    }  # fmt: skip
