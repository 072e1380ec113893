"""The operands of the three products of a linear layer in a recipe, and what comes after a product.

The emulation and the replay of captured tensors both compute with them, so that their bits are the same. With T the
transform of a product and q the quantiser of an operand:

    Y = q(T X) · q(T W)ᵀ        dX = q(T dY) · q(T W')        dW = q(T dY)ᵀ · q(T X')

X' and W' are X and W, or the values that the forward's quantiser made of them. With a mask, dX and dW are zero where
the forward clipped, and transformed back by the forward's transform (Quartet, arXiv 2505.14669).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional

from torch import Tensor

from capd_client.emulation.quantise import clip_mask, quantise, transform, transform_pair, untransform
from capd_client.emulation.words import Words

__all__ = ["OPERANDS_OF", "QuantisedOperands", "after_product", "quantised_operands"]

OPERANDS_OF = {"y": ("x", "w"), "dx": ("g", "w"), "dw": ("g", "x")}
"""The operands of each product, as recipes name them."""
_AXES = {"y": (-1, -1), "dx": (-1, 0), "dw": (0, 0)}


class QuantisedOperands(NamedTuple):
    """The operands of a product, in the shapes and the dtype of what was given.

    Attributes:
        quantised: The operands that are multiplied.
        plain: The operands before their quantisers, and after the transform of the product.
    """

    quantised: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]


def quantised_operands(product: str, operands: Mapping[str, Tensor], words: Words) -> QuantisedOperands:
    """Return the operands of a product of Y = X Wᵀ.

    Args:
        product: "y", "dx" or "dw".
        operands: Those of OPERANDS_OF: x [..., in], w [out, in] and g [tokens, out]. x is [tokens, in] for dw.
        words: The words of the recipe.

    Raises:
        FormatError: The size of a transform does not divide the contraction.
    """
    names, (axis_a, axis_b) = OPERANDS_OF[product], _AXES[product]
    word_a, word_b, turn = {
        "y": (words.a, words.b, words.transform),
        "dx": (words.gradient, words.backward_b, words.dgrad_transform),
        "dw": (words.gradient_of_weight, words.backward_a, words.wgrad_transform),
    }[product]
    a, b = (operands[name] for name in names)
    if product != "y":
        b = _forward(names[1], b, words)
    if turn:
        a, b = transform_pair(a, b, turn, axis_a, axis_b)
    return QuantisedOperands((quantise(a, word_a, axis_a), quantise(b, word_b, axis_b)), (a, b))


def _forward(name: str, operand: Tensor, words: Words) -> Tensor:
    """Return x or w as the backward starts with it."""
    if words.mask:
        operand = transform(operand, words.transform, -1)
    if name in words.requantised:
        operand = quantise(operand, words.a if name == "x" else words.b, -1)
    return operand


def after_product(product: str, result: Tensor, operand: Optional[Tensor], words: Words) -> Tensor:
    """Return dX [tokens, in] or dW [out, in] from the product of its operands.

    Args:
        product: "y", "dx" or "dw".
        result: The product.
        operand: The x of dX, or the w of dW; only needed with a mask.
        words: The words of the recipe.
    """
    if not words.mask or product == "y" or operand is None:
        return result
    word = words.a if product == "dx" else words.b
    # A product with numbers is several times as fast as one with bool.
    masked = result * clip_mask(transform(operand, words.transform, -1), word, -1).to(result.dtype)
    return untransform(masked, words.transform, -1)
