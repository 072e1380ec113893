"""The sorts of matrix products that are tapped: what their keys are called and which tensors they have. No torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ATTENTION", "GROUPED_LINEAR", "KINDS", "LINEAR", "Kind", "placement"]

_WITHOUT_GRADIENT = ("offsets", "output")  # integers; and grad_output is no result


class Kind(NamedTuple):
    """One sort of product.

    layer_type, component: as in the key. operands: names of the tensors that change from call to call, in the order of
    the product's arguments. parameter: name of the one that does not, kept once per iteration; "" where there is none.
    """

    layer_type: str
    component: str
    operands: tuple[str, ...]
    parameter: str = ""

    @property
    def forward_tensors(self) -> tuple[str, ...]:
        """What the forward captures."""
        return (*self.operands, *filter(None, [self.parameter]), "output")

    @property
    def default_tensors(self) -> tuple[str, ...]:
        """The operands of all products, those of the backward's too, and the result of the forward's."""
        return (*self.forward_tensors, "grad_output")

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that can be captured: also what a backward computes from the operands, on request."""
        computed = (f"grad_{name}" for name in self.forward_tensors if name not in _WITHOUT_GRADIENT)
        return (*self.default_tensors, *computed)


LINEAR = Kind("linear", "linear", ("input",), "weight")
"""Y = X Wᵀ. In the backward dX = dY W and dW = dYᵀ X."""

ATTENTION = Kind("attention", "FA", ("query", "key", "value"))
"""O = softmax(Q Kᵀ · scale) V, fused or not."""

GROUPED_LINEAR = Kind("linear", "grouped_linear", ("input", "offsets"), "weight")
"""Y = X Wᵀ for several groups of rows, each with a weight of its own: the experts of one layer.

The rows lie one group behind the other; `offsets` says where each group ends, and empty groups end where they begin.
"""

KINDS = (LINEAR, ATTENTION, GROUPED_LINEAR)


def placement(tensor_name: str) -> tuple[str, str]:
    """Operation and phase of a tensor: operands are "pre", results are "post"."""
    if tensor_name == "grad_output":
        return "backward", "pre"
    if tensor_name.startswith("grad_"):
        return "backward", "post"
    return "forward", "post" if tensor_name == "output" else "pre"
