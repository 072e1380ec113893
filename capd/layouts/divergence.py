"""The first tensor of a comparison that rounding does not explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from capd.layouts.judging import Judgement

__all__ = ["Divergence", "first_divergence"]

_FORWARD_INPUTS = ("input", "weight", "bias", "query", "key", "value")
_BACKWARD_INPUTS = (*_FORWARD_INPUTS, "grad_output")
_RESULTS = ("output", "grad_input", "grad_query")


class Divergence(NamedTuple):
    """The first divergent tensor.

    Attributes:
        judgement: The tensor.
        is_operand: Whether it is an operand, which operations that are not captured have computed.
        inputs_agree: Whether all captured inputs of its product are within their limits.
        after: The last result of a product before it in order of execution that is within its limit; None without one.
        inputs: The captured inputs that are beyond their limits.
    """

    judgement: Judgement
    is_operand: bool
    inputs_agree: bool
    after: Judgement | None
    inputs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One sentence on the tensor and its inputs."""
        name = self.judgement.aspect.text
        if not self.inputs_agree:
            return f"{name}; inputs already differ: {', '.join(self.inputs)}"
        if not self.is_operand:
            return f"{name}, whose captured inputs agree"
        what = (
            "the gradient of the whole step"
            if self.judgement.aspect.name.tensor == "main_grad"
            else "an operand"
        )
        if self.after is None:
            return f"{name}, {what}; nothing was captured before it"
        return f"{name}, {what}; computed after {self.after.aspect.text}, which agrees"


def first_divergence(judgements: Sequence[Judgement]) -> Divergence | None:
    """Return the first tensor beyond its limit whose captured inputs agree; else the earliest one; None if all agree.

    Args:
        judgements: In order of execution.
    """
    by_product: dict[tuple[object, ...], list[Judgement]] = {}
    for one in judgements:
        by_product.setdefault(_product(one), []).append(one)
        if one.aspect.name.is_parameter:
            # A weight is captured once per iteration, and read by all micro-batches.
            by_product.setdefault((one.aspect.name.module, one.at.iteration), []).append(one)
    beyond = [one for one in judgements if one.is_beyond]
    if not beyond:
        return None
    first: Divergence | None = None
    for one in beyond:
        found = _divergence(one, by_product, judgements)
        if found.inputs_agree:
            return found
        first = first or found
    return first


def _divergence(
    one: Judgement, by_product: dict[tuple[object, ...], list[Judgement]], judgements: Sequence[Judgement]
) -> Divergence:
    name = one.aspect.name
    forward = name.operation == "forward"
    operands = _FORWARD_INPUTS if forward else _BACKWARD_INPUTS
    own = [*by_product[_product(one)], *by_product.get((name.module, one.at.iteration), [])]
    if not forward:
        own += by_product.get((name.module, "forward", one.at), [])
    is_operand = name.tensor in (_FORWARD_INPUTS if forward else ("grad_output", "main_grad"))
    apart = () if is_operand else tuple(
        dict.fromkeys(other.aspect.text for other in own if other.aspect.name.tensor in operands and other.is_beyond)
    )  # fmt: skip
    return Divergence(one, is_operand, not apart, _before(one, judgements), apart)


def _before(one: Judgement, judgements: Sequence[Judgement]) -> Judgement | None:
    found = None
    for other in judgements:
        if other is one:
            return found
        same = (other.at.iteration, other.at.micro_batch, other.at.coordinates) == (
            one.at.iteration, one.at.micro_batch, one.at.coordinates,
        )  # fmt: skip
        if same and other.aspect.name.tensor in _RESULTS and not other.is_beyond:
            found = other
    return found


def _product(one: Judgement) -> tuple[object, ...]:
    return one.aspect.name.module, one.aspect.name.operation, one.at
