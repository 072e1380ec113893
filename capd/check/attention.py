"""The check of attention: O = softmax(Q Kᵀ · scale + mask) V, row by row.

Mask and scale are those which the record names. Where it names none, no mask and the causal mask are tried, with the
usual scale, 1/√width. A product that fits neither cannot be compared, unless a factor alone makes it fit: no mask does
that.
Sums and softmax are those of Dao et al., "FlashAttention", 2022, section 2.2.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from capd.check.comparable import UNKNOWN_CAST
from capd.check.judging import ProductJudgement, ProductLimits, judged_sums
from capd.check.precision import Precision, precision_of
from capd.check.residual import RowSums, fitted_sums, squares_of, without_nonfinite
from capd.products.captured.calls import CapturedTensor, ProductCall
from capd.store.read.series import tensor_of

__all__ = ["attention_reason", "judged_attention"]

_BLOCK_VALUES = 1 << 22
_LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
# The softmax, its weights and the product are each rounded.
_ROUNDINGS = 3
_NO_MASK, _CAUSAL, _CAUSAL_FROM_THE_END = "no_mask", "causal", "causal_bottom_right"
_VARIANTS = {
    "sliding_window": "a sliding window", "softcap": "a soft cap", "sinks": "sinks", "position_bias": "a position bias",
    "fp8": "operands in FP8",
}  # fmt: skip


class AttentionFacts(NamedTuple):
    """What the record of an attention's output says about the call.

    Attributes:
        mask: The word of its mask; None if it is not one of those that can be computed here.
        scale: The factor of Q Kᵀ; None if it is not known.
        dropout: The probability of dropout; None if it is not known.
        variant: What else changes the scores, as words for a reader.
    """

    mask: str | None
    scale: float | None
    dropout: float | None
    variant: tuple[str, ...]

    @property
    def are_whole(self) -> bool:
        """Whether they say all that decides over the output."""
        return self.mask is not None and self.scale is not None and self.dropout == 0


def facts_of(output: CapturedTensor) -> AttentionFacts:
    """Return the facts of a call. Numbers of foreign records that cannot be are unknown."""
    told = output.metadata
    # Megatron's word is that of an enumeration. Its unfused attention takes the mask that it is given instead.
    word = str(told.get("attn_mask_type") or "").rpartition(".")[2]
    is_given = told.get("attention_mask_shape") is not None
    computed = (_NO_MASK, _CAUSAL, _CAUSAL_FROM_THE_END)
    scale, dropout = (_number(told.get(name)) for name in ("softmax_scale", "attention_dropout"))
    variant = told.get("attention_variant")
    words = [str(one) for one in variant] if isinstance(variant, list) else []
    return AttentionFacts(
        word if word in computed and not is_given else None,
        scale,
        dropout,
        tuple(_VARIANTS.get(one, one) for one in words),
    )


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    # A job may have told an integer that no float64 has.
    number = float(value) if abs(value) <= sys.float_info.max else math.nan
    return number if math.isfinite(number) else None


def attention_reason(call: ProductCall) -> str | None:
    """Return why the output of a call of attention cannot be compared before it is read, None if it can."""
    for name, title in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
        one = call.tensors.get(name)
        if one is None:
            return f"{title} was not captured"
        if one.no_operand:
            return f"{title}: {one.no_operand}"
        if one.rows is not None:
            return f"{title}: a slice of it was captured"
        if 0 in one.shape:
            return f"{title}: it has no values"
    if call.emulation not in (None, "none"):
        return "emulated attention"
    if any("cp_size" in one.attributes and one.attributes["cp_size"] != 1 for one in call.tensors.values()):
        return "the sequence is split over context-parallel ranks"
    if precision_of([call.tensors[name].dtype for name in "qkvo"]) is None:
        return UNKNOWN_CAST
    if str(call.tensors["q"].attributes.get("layout")) not in _LAYOUTS or len(call.tensors["q"].shape) != 4:
        return "the order of the axes is not known"
    facts = facts_of(call.tensors["o"])
    if facts.dropout:
        return "dropout takes weights away at random"
    return f"it has {', '.join(facts.variant)}" if facts.variant else None


def judged_attention(call: ProductCall, limits: ProductLimits) -> ProductJudgement | str:
    """Judge the output of a call of attention, or return why it cannot be compared.

    Raises:
        capd.io.items.UNREADABLE: A tensor cannot be read.
    """
    known = precision_of([call.tensors[name].dtype for name in "qkvo"])
    if known is None:
        return UNKNOWN_CAST
    axes = _LAYOUTS[call.tensors["q"].attributes["layout"]]
    q, k, v = (_read(call.tensors[name]).permute(axes) for name in "qkv")
    o = _read(call.tensors["o"])
    heads = q.shape[1]
    if o.ndim == 3 and o.shape[-1] % heads == 0:
        o = o.reshape(*o.shape[:-1], heads, o.shape[-1] // heads)
    if o.ndim != 4:
        return "shapes that do not fit"
    o = o.permute(_LAYOUTS.get(str(call.tensors["o"].attributes.get("output_layout")), axes))
    fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or o.shape != (*q.shape[:3], v.shape[3]) or heads % k.shape[1]:
        return "shapes that do not fit"
    facts = facts_of(call.tensors["o"])
    if facts.mask == _CAUSAL_FROM_THE_END and q.shape[2] > k.shape[2]:
        return "its first queries see no key, and kernels differ in what they make of that"
    scale = 1 / math.sqrt(q.shape[3]) if facts.scale is None else facts.scale
    # With as many queries as keys both causal masks are the same.
    tried = (_NO_MASK, _CAUSAL) if q.shape[2] == k.shape[2] else (_NO_MASK, _CAUSAL, _CAUSAL_FROM_THE_END)
    found = []
    for mask in tried if facts.mask is None else (facts.mask,):
        sums = _sums(_Attention(q, k, v, scale, mask), o, known)
        found.append(judged_sums(sums, _no_columns(), k.shape[2], known, limits, _ROUNDINGS))
    best = min(found, key=lambda one: one.error)
    if best.is_beyond and not facts.are_whole and not _is_scaled(best, limits):
        return "its mask, scale or dropout is not recorded, and neither no mask nor the causal one fits"
    return best


def _is_scaled(found: ProductJudgement, limits: ProductLimits) -> bool:
    """Whether a factor explains the error of all rows."""
    return found.rest is not None and found.rest <= limits.tensor < found.error


def _read(tensor: CapturedTensor) -> Tensor:
    return tensor_of(tensor.read(), tensor.dtype)


class _Attention(NamedTuple):
    """Query, key and value [batch, heads, tokens, width], the factor of Q Kᵀ, and the word of the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: str


def _sums(operands: _Attention, o: Tensor, precision: Precision) -> RowSums:
    q, k, v, scale, mask = operands
    dtype = precision.computed_in
    shared, tokens = q.shape[1] // k.shape[1], k.shape[2]
    # The key that the first query sees last.
    start = tokens - q.shape[2] if mask == _CAUSAL_FROM_THE_END else 0
    d2, y2, s2, odd = [], [], [], []
    cc, largest = 0.0, min(torch.finfo(o.dtype).max, torch.finfo(precision.cast).max)
    step = max(1, _BLOCK_VALUES // max(1, tokens))
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = precision.operand(k[batch, head // shared]).t()
            values = precision.operand(v[batch, head // shared])
            squares = squares_of(values)
            for first in range(0, q.shape[2], step):
                own = precision.operand(q[batch, head, first : first + step])
                scores = own @ keys * scale
                if mask != _NO_MASK:
                    rows = torch.arange(first, first + own.shape[0])[:, None] + start
                    scores.masked_fill_(torch.arange(tokens) > rows, -math.inf)
                weights = scores.softmax(-1)
                y, c = weights @ values, o[batch, head, first : first + step].to(dtype)
                y, c, bad = without_nonfinite(y, c, largest)
                odd.append(bad)
                d2.append(squares_of(c - y))
                y2.append(squares_of(y))
                cc += float(squares_of(c).sum())
                # The weights are rounded to the dtype before they multiply, each of about the size of its share.
                s2.append((weights.double().square_() @ squares).nan_to_num(0.0, 0.0, 0.0))
    all_d2, all_y2 = torch.cat(d2), torch.cat(y2)
    fit = fitted_sums(float(all_d2.sum()), float(all_y2.sum()), cc)
    return RowSums(all_d2, all_y2, torch.cat(s2), fit, torch.cat(odd))


def _no_columns() -> RowSums:
    empty = torch.zeros(0, dtype=torch.float64)
    return RowSums(empty, empty, empty, (0.0, 0.0, 0.0), torch.zeros(0, dtype=torch.bool))
