"""The check of attention: O = softmax(Q Kᵀ · scale + mask) V, row by row.

The mask is that which the record names. Where it names none, no mask and the causal mask are tried, and a product that
fits neither cannot be compared. Sums and softmax are those of Dao et al., "FlashAttention", 2022, section 2.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from capd.check.judging import ProductJudgement, ProductLimits, judged_sums
from capd.check.precision import Precision, precision_of
from capd.check.residual import RowSums
from capd.products.captured.calls import CapturedTensor, ProductCall
from capd.store.read.series import tensor_of

__all__ = ["attention_reason", "judged_attention"]

_BLOCK_VALUES = 1 << 22
_LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
# The softmax, its weights and the product are each rounded.
_ROUNDINGS = 3


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
        return "operands and result have dtypes of which the cast is not known"
    if call.tensors["q"].attributes.get("layout") not in _LAYOUTS or len(call.tensors["q"].shape) != 4:
        return "the order of the axes is not known"
    return None


def judged_attention(call: ProductCall, limits: ProductLimits) -> ProductJudgement | str:
    """Judge the output of a call of attention, or return why it cannot be compared.

    Raises:
        capd.io.items.UNREADABLE: A tensor cannot be read.
    """
    known = precision_of([call.tensors[name].dtype for name in "qkvo"])
    if known is None:
        return "operands and result have dtypes of which the cast is not known"
    axes = _LAYOUTS[call.tensors["q"].attributes["layout"]]
    q, k, v = (_read(call.tensors[name]).permute(axes) for name in "qkv")
    o = _read(call.tensors["o"])
    heads = q.shape[1]
    if o.ndim == 3 and o.shape[-1] % heads == 0:
        o = o.reshape(*o.shape[:-1], heads, o.shape[-1] // heads)
    if o.ndim != 4:
        return "shapes that do not fit"
    o = o.permute(axes)
    fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or o.shape != (*q.shape[:3], v.shape[3]) or heads % k.shape[1]:
        return "shapes that do not fit"
    told = str(call.tensors["o"].metadata.get("attn_mask_type"))
    found = [
        judged_sums(
            _sums(q, k, v, o, known, causal=causal), _no_columns(), k.shape[2], known, limits, _ROUNDINGS
        )
        for causal in (True, False)
    ]
    best = min(found, key=lambda one: one.error)
    if best.is_beyond and not told.endswith(".causal"):
        return "the mask is not recorded, and neither none nor the causal one fits"
    return best


def _read(tensor: CapturedTensor) -> Tensor:
    return tensor_of(tensor.read(), tensor.dtype)


def _sums(q: Tensor, k: Tensor, v: Tensor, o: Tensor, precision: Precision, *, causal: bool) -> RowSums:
    dtype = precision.computed_in
    shared, tokens = q.shape[1] // k.shape[1], k.shape[2]
    d2, y2, s2, odd = [], [], [], []
    fit = [0.0, 0.0, 0.0]
    step = max(1, _BLOCK_VALUES // max(1, tokens))
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = precision.operand(k[batch, head // shared]).t()
            values = precision.operand(v[batch, head // shared])
            squares = values.square().sum(1)
            for first in range(0, q.shape[2], step):
                own = precision.operand(q[batch, head, first : first + step])
                scores = own @ keys / math.sqrt(q.shape[3])
                if causal:
                    rows = torch.arange(first, first + own.shape[0])[:, None] + (tokens - q.shape[2])
                    scores.masked_fill_(torch.arange(tokens) > rows, -math.inf)
                weights = scores.softmax(-1)
                y, c = weights @ values, o[batch, head, first : first + step].to(dtype)
                bad = ~(y.isfinite() & c.isfinite())
                odd.append((y.isfinite() != c.isfinite()).any(1))
                y, c = y.masked_fill(bad, 0.0), c.masked_fill(bad, 0.0)
                d2.append((c - y).square().sum(1).double())
                y2.append(y.square().sum(1).double())
                # The weights are rounded to the dtype before they multiply, each of about the size of its share.
                s2.append((weights.square() @ squares).double().nan_to_num(0.0))
                fit = [
                    fit[0] + float((c * y).sum()),
                    fit[1] + float((y * y).sum()),
                    fit[2] + float((c * c).sum()),
                ]
    return RowSums(torch.cat(d2), torch.cat(y2), torch.cat(s2), (fit[0], fit[1], fit[2]), torch.cat(odd))


def _no_columns() -> RowSums:
    empty = torch.zeros(0, dtype=torch.float64)
    return RowSums(empty, empty, empty, (0.0, 0.0, 0.0), torch.zeros(0, dtype=torch.bool))
