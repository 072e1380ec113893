"""Attention with quantised operands, in two levels: O = P · V with P = softmax(Q · Kᵀ · scale + mask).

straight-through: F.scaled_dot_product_attention itself. q and k are quantised along the head dimension, and v along
the keys. These are the contraction axes of the two products. The gradients of the quantised tensors are passed to
the raw ones. Every kernel of torch can be chosen as before, and takes the same memory.

exact: both products are emulated, forward and backward:

    S = q(Q) · q(K)ᵀ     P = dropout(softmax(scale · S + mask))     O = q(P) · q(V)
    dV = q(P)ᵀ · q(dO)   dP = q(dO) · q(V)ᵀ    dQ = q(dS) · q(K) · scale    dK = q(dS)ᵀ · q(Q) · scale

The computation runs in float32, as fused kernels accumulate, or in float64 if the operands are float64. The result
is cast to the dtype of the operands. S and P are kept for the backward, each [..., queries, keys]. Dropout draws
once, for P.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from capd_client.emulation.products import product
from capd_client.emulation.quantise import DTYPES, cast, straight_through
from capd_client.emulation.words import Words

__all__ = ["can_quantise", "exact", "fused"]

Function = Callable[..., Tensor]


def can_quantise(*operands: Any) -> bool:
    """Whether these are tensors that the quantisers take. Nested tensors are left alone."""
    return all(isinstance(t, Tensor) and t.dtype in DTYPES and not t.is_nested for t in operands)


def fused(
    attention: Function,
    qk: Optional[Words],
    pv: Optional[Words],
    operands: tuple[Tensor, Tensor, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute `attention` of quantised operands, with straight-through gradients."""
    q, k, v = operands
    if qk is not None:
        q, k = straight_through(cast(q), qk.a, -1), straight_through(cast(k), qk.b, -1)
    if pv is not None:
        v = straight_through(cast(v), pv.b, -2)
    return attention(q, k, v, *args, **kwargs)


def exact(
    qk: Optional[Words],
    pv: Optional[Words],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute F.scaled_dot_product_attention by the two emulated products.

    The arguments are those of torch's function.
    """
    dtype = cast(query).dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    q, k, v = (cast(t).to(wide) for t in (query, key, value))
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = _multiplied(q, k.mT, qk) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    weights = torch.dropout(_softmax(scores, _mask(scores, attn_mask, is_causal)), dropout_p, True)
    return _multiplied(weights, v, pv).to(dtype)


def _multiplied(a: Tensor, b: Tensor, words: Optional[Words]) -> Tensor:
    return a @ b if words is None else product(a, b, words)


def _mask(scores: Tensor, given: Optional[Tensor], is_causal: bool) -> Optional[Tensor]:
    """Return the term that is added to the scores: -inf for keys that are not seen."""
    if is_causal:
        if given is not None:
            raise RuntimeError("scaled_dot_product_attention: attn_mask and is_causal cannot both be given")
        given = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if given is None or given.dtype is not torch.bool:
        return given
    return torch.zeros_like(given, dtype=scores.dtype).masked_fill(~given, -torch.inf)


def _softmax(scores: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return the softmax over the keys. A query that sees no key has weights of 0, as in torch."""
    if mask is None:
        return torch.softmax(scores, -1)
    scores = scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
