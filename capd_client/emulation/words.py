"""The words of a product: the formats of its operands as text, which is a constant for a tracer."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

from capd_client.config.recipe import QuantSpec
from capd_client.emulation.quantise import transform_word, word_of, word_of_operand
from capd_client.recipes.linear_recipe import REQUANTISED, LinearRecipe

__all__ = ["Words", "words_of"]


class Words(NamedTuple):
    """The formats of one product's operands, as `quantise` knows them. "" for an operand that is not quantised."""

    a: str = ""
    b: str = ""
    backward_a: str = ""
    backward_b: str = ""
    gradient: str = ""
    # The same for dW, and the parts that only a recipe by products has (`capd_client.emulation.recipe_products`).
    gradient_of_weight: str = ""
    transform: str = ""
    dgrad_transform: str = ""
    wgrad_transform: str = ""
    requantised: str = ""
    mask: bool = False

    @property
    def formats(self) -> frozenset[str]:
        """The words of all quantisers."""
        own = (self.a, self.b, self.backward_a, self.backward_b, self.gradient, self.gradient_of_weight)
        return frozenset(filter(None, own))

    @property
    def is_by_products(self) -> bool:
        """Whether the words need more than a quantiser for each operand."""
        transforms = self.transform or self.dgrad_transform or self.wgrad_transform
        return bool(transforms or self.requantised or self.mask or self.gradient_of_weight != self.gradient)


def words_of(spec: Union[QuantSpec, LinearRecipe, None]) -> Optional[Words]:
    """Return the words of the product that `spec` is for. None if it is not emulated."""
    if spec is None:
        return None
    if isinstance(spec, QuantSpec):
        specs = (spec, spec.for_weight, spec.backward_spec, spec.backward_weight, spec.gradient_spec)
        a, b, backward_a, backward_b, gradient = map(word_of, specs)
        return Words(a, b, backward_a, backward_b, gradient, gradient)
    again = [
        name for name, own in (("w", spec.dgrad.b), ("x", spec.wgrad.b)) if own and own.source == REQUANTISED
    ]
    turns = (spec.fprop.transform, spec.dgrad.transform, spec.wgrad.transform)
    transform, of_dgrad, of_wgrad = map(transform_word, turns)
    return Words(
        a=word_of_operand(spec.fprop.a),
        b=word_of_operand(spec.fprop.b),
        backward_a=word_of_operand(spec.wgrad.b),
        backward_b=word_of_operand(spec.dgrad.b),
        gradient=word_of_operand(spec.dgrad.a),
        gradient_of_weight=word_of_operand(spec.wgrad.a),
        transform=transform,
        dgrad_transform=of_dgrad,
        wgrad_transform=of_wgrad,
        requantised="".join(again),
        mask=spec.mask,
    )
