"""The kinds of tapped matrix products: the names in their keys, and their tensors. No torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ATTENTION", "GROUPED_LINEAR", "KINDS", "LINEAR", "Kind", "placement"]

# Offsets are integers, and the gradient of the output is an operand, not a result.
_WITHOUT_GRADIENT = ("offsets", "output")


class Kind(NamedTuple):
    """One kind of product.

    Attributes:
        layer_type, component: As in the key.
        operands: The names of the tensors that change from call to call, in the order of the product's arguments.
        parameter: The name of the tensor that does not change, kept once per iteration; "" if there is none.
    """

    layer_type: str
    component: str
    operands: tuple[str, ...]
    parameter: str = ""

    @property
    def forward_tensors(self) -> tuple[str, ...]:
        """The tensors that the forward captures."""
        return (*self.operands, *filter(None, [self.parameter]), "output")

    @property
    def default_tensors(self) -> tuple[str, ...]:
        """The operands of all products, also of the backward, and the result of the forward."""
        return (*self.forward_tensors, "grad_output")

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that can be captured. On request this includes the gradients that the backward computes."""
        computed = (f"grad_{name}" for name in self.forward_tensors if name not in _WITHOUT_GRADIENT)
        return (*self.default_tensors, *computed)


LINEAR = Kind("linear", "linear", ("input",), "weight")
"""Y = X Wᵀ. In the backward dX = dY W and dW = dYᵀ X."""

ATTENTION = Kind("attention", "FA", ("query", "key", "value"))
"""O = softmax(Q Kᵀ · scale) V, fused or not."""

GROUPED_LINEAR = Kind("linear", "grouped_linear", ("input", "offsets"), "weight")
"""Y = X Wᵀ for several groups of rows, each with its own weight: the experts of one layer.

The rows of one group follow those of the group before. `offsets` holds the end of each group; an empty group ends
where it begins.
"""

KINDS = (LINEAR, ATTENTION, GROUPED_LINEAR)


def placement(tensor_name: str) -> tuple[str, str]:
    """Return operation and phase of a tensor: operands are "pre", results are "post"."""
    if tensor_name == "grad_output":
        return "backward", "pre"
    if tensor_name.startswith("grad_"):
        return "backward", "post"
    return "forward", "post" if tensor_name == "output" else "pre"
