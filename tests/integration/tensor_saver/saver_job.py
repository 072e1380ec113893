"""Runs code blocks of tensor_saver's documents (blocks.md), with what stands around them there.

    seed_job.py NAME…

IMPORT_FROM is the module that the blocks import the calls from, in the place of `megatron.core.tensor_saver`. What the
documents leave out as `...` in a call is ELIDED. Prints the counters.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import capd_client

BLOCKS = Path(__file__).with_name("blocks.md")
TENSOR_SAVER = "megatron.core.tensor_saver"
ELIDED = {
    "tensor": torch.ones(2, 3), "layer_type": "linear", "operation": "forward", "quant_type": "bf16",
    "tensor_name": "elided",
}  # fmt: skip


def blocks() -> dict[str, str]:
    """The blocks by their headings."""
    return dict(re.findall(r"^## (\S+)\n\n```\w+\n(.*?)^```$", BLOCKS.read_text(), re.S | re.M))


def surroundings(module: str) -> dict[str, Any]:
    """What the code around the blocks has at hand."""
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    return {
        "os": os, "torch": torch, "ELIDED": ELIDED, "my_tensor": tensor, "output": tensor, "query": tensor,
        "key": tensor + 1, "value": tensor + 2, "attention_mask": torch.ones(2, 2), "attn_mask_type": "causal",
        "total_input": tensor, "input_tensor": tensor, "weight": tensor + 3, "grad_output": tensor + 4,
        "sequence_parallel": False, "use_bias": True, "wgrad_compute": True, "tp_group": None,
        "custom_quant_type": os.environ.get("CUSTOM_QUANT_TYPE", "hifp8"), "num_iterations": 2, "num_batches": 2,
        "save_tensor": import_module(module).save_tensor, "self": SimpleNamespace(layer_number=1),
        "ctx": SimpleNamespace(layer_idx=5, sequence_parallel=False),
    }  # fmt: skip


def main() -> None:
    source = blocks()
    module = os.environ.get("IMPORT_FROM", "capd_client.tensor_saver")
    for name in sys.argv[1:]:
        code = source[name].replace(TENSOR_SAVER, module).replace("save_tensor(...)", "save_tensor(**ELIDED)")
        exec(compile(code, name, "exec"), surroundings(module))  # noqa: S102 - users' code
    assert capd_client.flush(30)
    print(json.dumps(capd_client.counters()))


if __name__ == "__main__":
    main()
