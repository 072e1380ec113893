"""Vocabularies that one layout padded: the words that both runs have."""

from __future__ import annotations

from capd.layouts.views import Values
from capd.layouts.whole_run import TensorName

__all__ = ["common_words"]

# The output layer and the embedding, as Megatron, transformers and torchtitan name them.
_OF_WORDS = ("output_layer", "lm_head", "output", "word_embeddings", "embed_tokens", "tok_embeddings")
_AXES = {"weight": 0, "bias": 0, "grad_weight": 0, "grad_bias": 0, "output": -1, "grad_output": -1}


def common_words(name: TensorName, found: Values, reference: Values) -> tuple[Values, Values] | None:
    """Return both tensors without the words that only one has; None if they differ in anything else.

    Megatron pads the vocabulary to a multiple of the tensor parallel size, so the sizes of two layouts differ.
    """
    axis = _AXES.get(name.tensor)
    if axis is None or name.module.rpartition(".")[2] not in _OF_WORDS or found.ndim != reference.ndim:
        return None
    words = min(found.shape[axis], reference.shape[axis])
    one, two = (values[:words] if axis == 0 else values[..., :words] for values in (found, reference))
    return (one, two) if one.shape == two.shape else None
