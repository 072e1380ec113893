"""The transformers client of training_overhead.py: a Llama of the size of the benchmark's own model.

Besides every Linear its attention is captured: query, key, value, output and their gradients, eight tensors per
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TENSORS = (
    "input", "output", "grad_output", "grad_input", "query", "key", "value", "grad_query", "grad_key", "grad_value",
)  # fmt: skip
_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]


class Llama(nn.Module):
    """A Llama: token ids in, mean cross entropy of the next token out. It has the benchmark's sizes, or tiny ones."""

    def __init__(self, vocabulary: int, d_model: int, heads: int, layers: int) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=d_model,
                intermediate_size=3 * d_model,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 2,
                attn_implementation="sdpa",
                use_cache=False,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.llama(input_ids=tokens, labels=tokens).loss
        return loss


class AttentionHooks:
    """Hooks that pass query, key, value and output of every attention, and their gradients, to `take`."""

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        def gradient(tensor: Tensor) -> None:
            take(tensor)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            operands = [tensor.view_as(tensor) for tensor in args[:3]]
            for operand in operands:
                take(operand)
                operand.register_hook(gradient)
            output, weights = _SDPA(module, *operands, *args[3:], **kwargs)
            take(output)
            output.register_hook(gradient)
            return output, weights

        AttentionInterface.register("sdpa", attend)

    def remove(self) -> None:
        AttentionInterface.register("sdpa", _SDPA)


def make_idle() -> nn.Module:
    """Return a model with so little computation that the cost of hooks is visible."""
    return Llama(vocabulary=64, d_model=16, heads=2, layers=4)
