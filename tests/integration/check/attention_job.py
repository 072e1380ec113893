"""A job of attentions in bfloat16: sound ones of many kinds, and some whose function has a bug."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
)

TOKENS, HEADS = 48, 4
SOUND: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "whole": {},
    "scaled": {"is_causal": True, "scale": 0.02},
    "few_queries": {"is_causal": True},
}
BUGS = ("times105", "stale_row", "other_scale", "no_mask")
LEFT_OUT: dict[str, dict[str, Any]] = {
    "dropped": {"is_causal": True, "dropout_p": 0.1},
    "windowed": {"attn_mask": torch.ones(TOKENS, TOKENS).tril().triu(-30).bool()},
}
# The width of a head tells the attention with a bug from the others.
WIDTHS = {bug: 32 + 8 * place for place, bug in enumerate(BUGS)}
_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**_SMALL, attn_implementation="sdpa"),
    "llama_eager": LlamaConfig(**_SMALL, attn_implementation="eager"),
    "llama_dropped": LlamaConfig(**_SMALL, attention_dropout=0.2, attn_implementation="sdpa"),
    "granite": GraniteConfig(**_SMALL, attention_multiplier=0.015, attn_implementation="sdpa"),
    "mistral": MistralConfig(**_SMALL, sliding_window=30, attn_implementation="sdpa"),
    "mistral_wide": MistralConfig(**_SMALL, sliding_window=TOKENS, attn_implementation="sdpa"),
    "gemma2": Gemma2Config(**_SMALL, query_pre_attn_scalar=17, attn_implementation="eager"),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.1, attn_implementation="sdpa"
    ),
}
_SDPA = F.scaled_dot_product_attention


def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """F.scaled_dot_product_attention, with a bug for some widths."""
    bug = next((bug for bug, width in WIDTHS.items() if width == q.shape[-1]), "")
    if bug == "no_mask":
        kwargs["is_causal"] = False
    if bug == "other_scale":
        kwargs["scale"] = 1.5 / q.shape[-1] ** 0.5
    out = _SDPA(q, k, v, *args, **kwargs)
    if bug == "stale_row":
        out = out.clone()
        out[0, 1, 7] = out[0, 1, 6]
    return out * 1.05 if bug == "times105" else out


class Attention(nn.Module):
    """Attention of drawn operands: `q` with 30 queries for few_queries."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.queries = 30 if name == "few_queries" else TOKENS
        self.width, self.arguments = WIDTHS.get(name, 16), arguments

    def forward(self) -> Tensor:
        shapes = ((HEADS, self.queries), (HEADS // 2, TOKENS), (HEADS // 2, TOKENS))
        q, k, v = (torch.randn(2, *shape, self.width).bfloat16() for shape in shapes)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.arguments)


class Model(nn.Module):
    """One attention of each kind, torch's own module, and small models of transformers with padded rows."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {**SOUND, **{bug: {"is_causal": True} for bug in BUGS}, **LEFT_OUT}
        self.kinds = nn.ModuleDict({name: Attention(name, arguments) for name, arguments in kinds.items()})
        self.multihead = nn.MultiheadAttention(32, 4, batch_first=True)
        self.models = nn.ModuleDict(
            {name: AutoModelForCausalLM.from_config(one) for name, one in MODELS.items()}
        )

    def forward(self) -> None:
        for attention in self.kinds.values():
            attention()
        x = torch.randn(2, TOKENS, 32)
        self.multihead(x, x, x, need_weights=False)
        self.multihead(x, x, x)
        ids, rows = torch.randint(64, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.long)
        padded = rows.clone()
        padded[1, -5:] = 0
        for model in self.models.values():
            model(input_ids=ids, attention_mask=rows)
            model(input_ids=ids, attention_mask=padded)


def main() -> int:
    import capd_client

    F.scaled_dot_product_attention = attend
    torch.manual_seed(0)
    model = Model().train()
    capd_client.watch(model, tensors=["query", "key", "value", "output"])
    model()
    return 0 if capd_client.flush(60) else 1


if __name__ == "__main__":
    sys.exit(main())
