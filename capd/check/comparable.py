"""Says why a captured product cannot be compared with its operands, if it cannot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from capd.check.precision import Precision, precision_of
from capd.errors import ConfigError
from capd.products.captured.calls import CapturedTensor, ProductCall
from capd.replay.recipes import ReplayRecipe
from capd_client.config.recipe import NONE, Recipe
from capd_client.emulation.words import Words, words_of
from capd_client.recipes.find import is_recipe_file

__all__ = [
    "NAMES",
    "OPERANDS",
    "TITLES",
    "UNKNOWN_CAST",
    "parts_of",
    "precision_of_product",
    "reason_of",
    "recipe_of",
]

OPERANDS = {"y": ("x", "w"), "dx": ("g", "w"), "dw": ("g", "x")}
"""The operands of each product of a linear layer."""
TITLES = {"y": "Y", "dx": "dX", "dw": "dW", "o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
"""The products as tables name them."""
NAMES = {
    "x": "input", "w": "weight", "g": "grad_output", "y": "output", "dx": "grad_input", "dw": "grad_weight",
    "q": "query", "k": "key", "v": "value", "do": "grad_output", "o": "output",
}  # fmt: skip
"""The names of tensors in keys."""
UNKNOWN_CAST = "operands and result have dtypes of which the cast is not known"
"""The reason why a product of unknown precision cannot be compared."""
# The placements, over one dimension of the ranks, with which each rank's own operands give its own product.
# T: tokens are split, I: the layer's inputs, O: its outputs. P: a part of a sum.
_ALONE = {
    "y": ({"x": "T", "y": "T"}, {"w": "O", "y": "O"}, {"x": "I", "w": "I", "y": "P"}),
    "dx": ({"g": "T", "dx": "T"}, {"g": "O", "w": "O", "dx": "P"}, {"w": "I", "dx": "I"}),
    "dw": ({"g": "T", "x": "T", "dw": "P"}, {"g": "O", "dw": "O"}, {"x": "I", "dw": "I"}),
}


def reason_of(product: str, calls: Sequence[ProductCall]) -> str | None:
    """Return why a product of a linear layer cannot be compared, None if it can.

    Args:
        product: "y", "dx" or "dw".
        calls: The call; of dW all calls of the micro-batch.
    """
    if not calls:
        return f"{NAMES[OPERANDS[product][0]]} was not captured"
    for call in calls:
        names = (*OPERANDS[product], *((product,) if product in call.tensors else ()))
        for name in names:
            reason = _reason_of_tensor(name, call.tensors.get(name))
            if reason is not None:
                return reason
        tensors = {name: call.tensors[name] for name in names}
        reason = _reason_of_rows(product, tensors) or _reason_of_parts(product, tensors)
        if reason is not None:
            return reason
    if precision_of_product(product, calls) is None:
        return UNKNOWN_CAST
    return None


def _reason_of_tensor(name: str, one: CapturedTensor | None) -> str | None:
    title = NAMES[name]
    if one is None:
        return f"{title} was not captured"
    if one.no_operand:
        return f"{title}: {one.no_operand}"
    operands = one.attributes.get("operands")
    if operands is not None and name in ("x", "w", "g"):
        return f"{title}: captured {str(operands)[:60]!r}, not as multiplied"
    if one.attributes.get("tied"):
        return f"{title}: other modules have the same weight, and their gradients are in it"
    if name in ("w", "dw") and one.rows is not None:
        return f"{title}: a slice of it was captured"
    if 0 in one.shape or not one.shape:
        return f"{title}: it has no values"
    return None


def _reason_of_rows(product: str, tensors: Mapping[str, CapturedTensor]) -> str | None:
    slices = {one.rows for name, one in tensors.items() if name not in ("w", "dw")}
    if product == "dw" and slices != {None}:
        return "slices of tokens were captured, and dW is the sum over all"
    if len(slices) > 1:
        return "different slices of the operands and the product were captured"
    return None


def _reason_of_parts(product: str, tensors: Mapping[str, CapturedTensor]) -> str | None:
    """Return why the parts of one rank alone do not make the product. A whole tensor has no parts."""
    if product not in tensors or any(one.is_whole for one in tensors.values()):
        return None
    ends = "_placement"
    dimensions = {each for one in tensors.values() for each in one.attributes if each.endswith(ends)}
    for each in sorted(dimensions):
        found = {name: _role(name, one, str(one.attributes.get(each, "R"))) for name, one in tensors.items()}
        split = {name: role for name, role in found.items() if role != "R"}
        if split and split not in _ALONE[product]:
            dimension = each.removesuffix(ends)
            return f"the ranks of {dimension} have parts of it; check all ranks together"
    return None


def _role(name: str, one: CapturedTensor, placement: str) -> str:
    if placement.startswith("P"):
        return "P"
    if placement.startswith("R"):
        return "R"
    inside = placement[placement.find("(") + 1 : placement.find(")")]
    axis = int(inside) if inside.lstrip("-").isdecimal() else 0
    axis = axis % len(one.shape) if one.shape else 0
    is_last = axis == len(one.shape) - 1
    if name in ("w", "dw"):
        return "I" if is_last != one.is_transposed else "O"
    if not is_last:
        return "T"
    return "I" if name in ("x", "dx") else "O"


def precision_of_product(product: str, calls: Sequence[ProductCall]) -> Precision | None:
    """Return the precision in which a product was multiplied."""
    names = [*OPERANDS[product], product]
    tensors = chain.from_iterable(
        (call.tensors[name] for name in names if name in call.tensors) for call in calls
    )
    return precision_of(list(map(_multiplied, tensors)))


def _multiplied(one: CapturedTensor) -> str:
    """Return the dtype of a tensor, or of the parts that were added up."""
    added = one.attributes.get("sum")
    return added.rpartition(" from ")[2] if isinstance(added, str) and one.is_whole else one.dtype


def parts_of(one: CapturedTensor) -> int:
    """Return of how many ranks a whole tensor is the sum."""
    if not one.is_whole:
        return 1
    found = (
        one.attributes.get(f"{name.removesuffix('_placement')}_size")
        for name, value in one.attributes.items()
        if name.endswith("_placement") and isinstance(value, str) and value.startswith("P")
    )
    return math.prod(size for size in found if type(size) is int and 0 < size <= 1 << 20)


def recipe_of(calls: Iterable[ProductCall], product: str) -> ReplayRecipe | str | None:
    """Return the recipe by which an emulated job quantised the operands, None if it did not.

    A text says why the recipe cannot be applied again.
    """
    for call in calls:
        if call.emulation is None or call.emulation == NONE:
            continue
        if any(one.is_whole for one in call.tensors.values()):
            return "emulated products of several ranks; check one rank (--rank)"
        # A label of a record is no name of a file to read.
        if is_recipe_file(call.emulation):
            return "the recipe of the emulation is not known to this capd"
        if ReplayRecipe("none", Words()).is_of(call):
            continue
        try:
            words = words_of(Recipe.of(call.emulation).linear)
        except ConfigError:
            return "the recipe of the emulation is not known to this capd"
        recipe = ReplayRecipe("emulation", words or Words())
        if recipe.words.mask and product != "y":
            return "the emulation masks the gradient after the product"
        if call.is_grouped:
            return "emulated products of several experts"
        return "the emulation rounded at random" if recipe.is_random(product) else recipe
    return None
