"""A recipe: how the operands of Y = X · Wᵀ, dX = dY · W and dW = dYᵀ · X are quantised.

Each product has two operands. An operand has a format with its options, and a source: the captured tensor, or the
values that the forward's format made of it. Both operands of a product may be transformed along the contraction, which
cancels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Optional

from capd_client.errors import ConfigError
from capd_client.formats.spec import FormatError, Spec, spec_of

__all__ = ["OPERANDS", "PRODUCTS", "RAW", "REQUANTISED", "LinearRecipe", "Operand", "Product", "Transform"]

PRODUCTS = ("fprop", "dgrad", "wgrad")
"""The names of the products: Y, dX and dW."""
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
"""The operands of each product, x the input, w the weight and g the gradient of the output."""
RAW, REQUANTISED = "raw", "requantised"


@dataclass(frozen=True)
class Transform:
    """A Hadamard transform of both operands along the contraction.

    Attributes:
        size: The values of a group, a power of two up to 128.
        signs: "none", "te" for TransformerEngine's fixed signs of size 16, or "seeded": random, drawn for each product
            again, and the same for both operands.
        round_to: The dtype to which the transformed values are rounded, "bf16", or "" for the operand's own.
    """

    size: int
    signs: str = "none"
    round_to: str = ""

    def as_mapping(self) -> dict[str, Any]:
        """Return the table of a recipe's file."""
        found: dict[str, Any] = {"kind": "hadamard", "size": self.size, "signs": self.signs}
        return {**found, "round": self.round_to} if self.round_to else found


@dataclass(frozen=True)
class Operand:
    """The format of one operand. Blocks run along the contraction.

    Attributes:
        format: The name of the format.
        options: Its options, as `capd_client.formats.qdq` takes them, without the axis.
        source: RAW, or REQUANTISED for the values that the forward's format made.
    """

    format: str
    options: tuple[tuple[str, Any], ...] = ()
    source: str = RAW

    @property
    def spec(self) -> Spec:
        """The format with all options settled. Raises FormatError."""
        return spec_of(self.format, dict(self.options))

    def as_mapping(self) -> dict[str, Any]:
        """Return the table of a recipe's file."""
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options}
        source = {} if self.source == RAW else {"source": self.source}
        return {"format": self.format, **options, **source}


@dataclass(frozen=True)
class Product:
    """One of the three products.

    Attributes:
        a: The format of the first operand: x, g and g. None if it is not quantised.
        b: The format of the second one: w, w and x.
        transform: The transform of both.
    """

    a: Optional[Operand] = None
    b: Optional[Operand] = None
    transform: Optional[Transform] = None


@dataclass(frozen=True)
class LinearRecipe:
    """The recipe of a linear layer.

    Attributes:
        name: Its name in labels and tables.
        mask: Whether gradients pass only where the forward's format did not clip, and back through its transform.
        fprop, dgrad, wgrad: The products.
    """

    name: str
    fprop: Product = field(default_factory=Product)
    dgrad: Product = field(default_factory=Product)
    wgrad: Product = field(default_factory=Product)
    mask: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def as_mapping(self) -> dict[str, Any]:
        """Return the tables of a recipe's file, which `capd_client.recipes.parse` reads back."""
        found: dict[str, Any] = {"name": self.name}
        if self.mask:
            found["mask"] = True
        for name in PRODUCTS:
            product: Product = getattr(self, name)
            table: dict[str, Any] = {}
            for operand, spec in zip(OPERANDS[name], (product.a, product.b), strict=True):
                if spec is not None:
                    table[operand] = spec.as_mapping()
            if product.transform is not None:
                table["transform"] = product.transform.as_mapping()
            found[name] = table
        return found

    def text(self) -> str:
        """Return canonical JSON."""
        return json.dumps(self.as_mapping(), sort_keys=True, separators=(",", ":"))


def _check(recipe: LinearRecipe) -> None:
    """Raise ConfigError for a recipe that cannot be."""
    for name in PRODUCTS:
        product: Product = getattr(recipe, name)
        for operand, own in zip(OPERANDS[name], (product.a, product.b), strict=True):
            where = f"recipe {recipe.name}, {name}.{operand}"
            if own is not None:
                _check_operand(recipe, product, own, name, operand, where)
    if recipe.mask:
        forward = (recipe.fprop.a, recipe.fprop.b)
        if any(one is None or dict(one.options).get("scale_mode") != "std" for one in forward):
            raise ConfigError(f'recipe {recipe.name}: mask needs scale_mode = "std" of fprop.x and fprop.w')
        if recipe.fprop.transform is not None and recipe.fprop.transform.signs == "seeded":
            raise ConfigError(
                f"recipe {recipe.name}: mask needs a forward transform whose signs are not seeded"
            )


def _check_operand(
    recipe: LinearRecipe, product: Product, own: Operand, name: str, operand: str, where: str
) -> None:
    try:
        spec = own.spec
    except FormatError as error:
        raise ConfigError(f"{where}: {error}") from None
    if own.source == REQUANTISED and (name == "fprop" or operand == "g"):
        raise ConfigError(f"{where}: only x and w of dgrad and wgrad can be {REQUANTISED}")
    forward = recipe.fprop.a if operand == "x" else recipe.fprop.b
    if own.source == REQUANTISED and forward is None:
        raise ConfigError(f"{where}: it is {REQUANTISED}, but fprop.{operand} has no format")
    if spec.rounding == "eden" and (product.transform is None or product.transform.size != 128):
        raise ConfigError(f'{where}: rounding = "eden" needs a transform of size 128')
    if (
        recipe.fprop.transform is not None
        and name != "fprop"
        and not recipe.mask
        and own.source == REQUANTISED
    ):
        raise ConfigError(f"{where}: {REQUANTISED} values of a transformed forward need mask = true")
