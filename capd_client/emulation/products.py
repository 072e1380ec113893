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

from typing import Any, Optional

import torch
from torch import Tensor

# F.linear may be patched, and this must be torch's own.
from torch._C._nn import linear as _linear

from capd_client.emulation.quantise import DTYPES, cast, has_no_axis, quantise, straight_through
from capd_client.emulation.recipe_products import after_product, quantised_operands
from capd_client.emulation.words import Words

__all__ = ["linear", "product"]


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], words: Words) -> Tensor:
    """Compute F.linear(x, weight, bias) with quantised operands: x [..., in], weight [out, in], bias [out] or None.

    Operands are first cast as autocast would. The result has the dtype of F.linear's result.
    """
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return _linear(x, weight, bias)
    if words.is_by_products:
        return _LinearByProducts.apply(cast(x), cast(weight), cast(bias), words)  # type: ignore[no-any-return, no-untyped-call]
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


class _LinearByProducts(torch.autograd.Function):
    """The same with the operands of a recipe by products. A second derivative is not defined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], words: Words) -> Tensor:
        ctx.words = words
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            x if needs_weight or words.mask else None, weight if needs_x or words.mask else None
        )
        ctx.shape = x.shape
        a, b = quantised_operands("y", {"x": x, "w": weight}, words).quantised
        return _linear(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0].requires_grad:
            raise RuntimeError("a recipe by products has no second derivative; emulate a format instead")
        x, weight = ctx.saved_tensors
        words = ctx.words
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        tokens = None if x is None else x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            a, b = quantised_operands("dx", {"g": rows, "w": weight}, words).quantised
            grad_x = after_product("dx", a @ b, tokens, words).reshape(ctx.shape)
        if tokens is not None and ctx.needs_input_grad[1]:
            a, b = quantised_operands("dw", {"g": rows, "x": tokens}, words).quantised
            grad_weight = after_product("dw", a.t() @ b, weight, words)
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
