"""Trains in transformers the model of `tests.kit.models.megatron_layouts`, with the same weights and samples.

    python -m tests.kit.models.llama_layouts LAYOUT [SWAPPED]

LAYOUT is a `Layout` as JSON, of one rank. SWAPPED names a projection of layer 1, such as `k_proj`, whose rows are put
in the reverse order: a mistake of a conversion.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from capd.store.logical.positions import QkvHeads
from tests.kit.models.megatron_layouts import SAMPLES, Layout, sample, values

TENSORS = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")


def main(layout: Layout, swapped: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    configuration: Any = LlamaConfig
    torch.set_num_threads(1)
    capd_client = importlib.import_module("capd_client")  # so that `capd run` watches nothing by itself
    config = configuration(
        vocab_size=layout.padded, hidden_size=layout.hidden, intermediate_size=layout.ffn,
        num_hidden_layers=layout.layers, num_attention_heads=layout.heads, num_key_value_heads=layout.groups,
        rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).train()
    model.load_state_dict(converted(layout))
    if swapped:
        weight = model.get_submodule(f"model.layers.1.self_attn.{swapped}").weight
        with torch.no_grad():
            weight.copy_(weight.flip(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=layout.lr)
    handle = capd_client.watch(model, steps="all", tensors=TENSORS)
    for step in range(layout.steps):
        for number in range(SAMPLES):
            tokens = sample(layout, step, number)
            logits = model(tokens[:, :-1]).logits.float()
            loss: Any = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            # As Megatron's schedule: by the tokens, and by the micro-batches.
            (loss / (layout.rows * layout.sequence) / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    capd_client.close()


def converted(layout: Layout) -> dict[str, Tensor]:
    """The state of the model, from the whole parameters of Megatron's."""
    size = layout.hidden // layout.heads
    fused = QkvHeads(layout.heads, layout.groups, size)
    state = {
        "model.embed_tokens.weight": values(
            "embedding.word_embeddings.weight", (layout.padded, layout.hidden)
        ),
        "model.norm.weight": values("decoder.final_layernorm.weight", (layout.hidden,)),
        "lm_head.weight": values("output_layer.weight", (layout.padded, layout.hidden)),
    }
    for layer in range(layout.layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
        for name, own in norms.items():
            state[f"{there}.{own}.weight"] = values(f"{here}.{name}.weight", (layout.hidden,))
        rows = values(f"{here}.self_attention.linear_qkv.weight", (fused.rows, layout.hidden))
        for letter, at in zip("qkv", fused.fused_rows(), strict=True):
            state[f"{there}.self_attn.{letter}_proj.weight"] = rows[torch.from_numpy(at)]
        state[f"{there}.self_attn.o_proj.weight"] = values(
            f"{here}.self_attention.linear_proj.weight", (layout.hidden, layout.hidden)
        )
        gate, up = values(f"{here}.mlp.linear_fc1.weight", (2 * layout.ffn, layout.hidden)).chunk(2)
        state |= {f"{there}.mlp.gate_proj.weight": gate, f"{there}.mlp.up_proj.weight": up}
        state[f"{there}.mlp.down_proj.weight"] = values(
            f"{here}.mlp.linear_fc2.weight", (layout.hidden, layout.ffn)
        )
    return state


if __name__ == "__main__":
    main(Layout(**json.loads(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else "")
