"""Matrix products whose operands are quantised, in the forward and in the backward, each along its contraction axis.

With q the quantiser, X [tokens, in], W [out, in], and dY the gradient of Y:

    Y = q(X, in) · q(W, in)ᵀ        dX = q(dY, out) · q(W, out)        dW = q(dY, tokens)ᵀ · q(X, tokens)

Every operand is quantised from the original tensor, never from the quantised operand of another product. This is the
training flow of the MX formats, as in microxcaling's `linear` and torchao's `mx_mm`.

X and W themselves are saved for the backward, not copies of them. So activations that several layers read, and
weights that FSDP frees, take no more memory than without emulation. A second derivative passes the quantisers
straight through.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

# F.linear may be patched, and this must be torch's own.
from torch._C._nn import linear as _linear

from capd_client.config.recipe import QuantSpec
from capd_client.emulation.quantise import DTYPES, cast, has_no_axis, quantise, straight_through, word_of

__all__ = ["Words", "linear", "product", "words_of"]


class Words(NamedTuple):
    """The formats of one product's operands, as `quantise` knows them. "" for an operand that is not quantised."""

    a: str = ""
    b: str = ""
    backward_a: str = ""
    backward_b: str = ""
    gradient: str = ""


def words_of(spec: Optional[QuantSpec]) -> Optional[Words]:
    """Return the words of the product that `spec` is for. None if it is not emulated."""
    if spec is None:
        return None
    specs = (spec, spec.for_weight, spec.backward_spec, spec.backward_weight, spec.gradient_spec)
    return Words(*map(word_of, specs))


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], words: Words) -> Tensor:
    """Compute F.linear(x, weight, bias) with quantised operands: x [..., in], weight [out, in], bias [out] or None.

    Operands are first cast as autocast would. The result has the dtype of F.linear's result.
    """
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return _linear(x, weight, bias)
    return _Linear.apply(cast(x), cast(weight), cast(bias), words)  # type: ignore[no-any-return, no-untyped-call]


def product(a: Tensor, b: Tensor, words: Words) -> Tensor:
    """Compute a @ b with quantised operands: a [..., m, k], b [..., k, n]."""
    return _Product.apply(cast(a), cast(b), words)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], words: Words) -> Tensor:
        ctx.words = words
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.shape = x.shape
        return _linear(quantise(x, words.a, -1), quantise(weight, words.b, -1), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        words = ctx.words
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        grad_x = grad_weight = grad_bias = along = None
        if weight is not None:
            along = straight_through(rows, words.gradient, -1)
            grad_x = (along @ straight_through(weight, words.backward_b, 0)).reshape(ctx.shape)
        if x is not None:
            shared = along if has_no_axis(words.gradient) or not words.gradient else None
            across = straight_through(rows, words.gradient, 0) if shared is None else shared
            tokens = straight_through(x.reshape(-1, x.shape[-1]), words.backward_a, 0)
            grad_weight = across.t() @ tokens
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, words: Words) -> Tensor:
        ctx.words = words
        ctx.save_for_backward(a, b)
        return quantise(a, words.a, -1) @ quantise(b, words.b, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        a, b = ctx.saved_tensors
        words, gradient = ctx.words, gradients[0]
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            along = straight_through(gradient, words.gradient, -1)
            grad_a = (along @ straight_through(b, words.backward_b, -1).mT).sum_to_size(a.shape)
        if ctx.needs_input_grad[1]:
            across = straight_through(gradient, words.gradient, -2)
            grad_b = (straight_through(a, words.backward_a, -2).mT @ across).sum_to_size(b.shape)
        return grad_a, grad_b, None
