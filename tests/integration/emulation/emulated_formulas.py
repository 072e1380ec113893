"""What an emulated attention gives, written out from the definition of the formats' products."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from capd_client.formats import qdq


def close(ours: Tensor, expected: Tensor) -> None:
    """The order of additions differs; a format of three bits is off by 1e-2 and more."""
    assert ours.shape == expected.shape
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, *, qk: str, pv: str, mask: Tensor
) -> dict[str, Tensor]:
    """Output and gradients of softmax(q · kᵀ / √size + mask) · v, all [batch, heads, tokens, size].

    Each operand is quantised along the contraction of its product, in the forward and in the backward.
    """
    of_scores, of_values = partial(qdq, fmt=qk), partial(qdq, fmt=pv)
    scale = 1 / math.sqrt(q.shape[-1])
    probs = torch.softmax(scale * (of_scores(q) @ of_scores(k).mT) + mask, -1)
    d_probs = of_values(dy) @ of_values(v).mT
    d_scores = probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True)) * scale
    return {
        "output": of_values(probs) @ of_values(v, axis=-2),
        "grad_query": of_scores(d_scores) @ of_scores(k, axis=-2),
        "grad_key": of_scores(d_scores, axis=-2).mT @ of_scores(q, axis=-2),
        "grad_value": of_values(probs, axis=-2).mT @ of_values(dy, axis=-2),
    }
