"""Reads a recipe from the tables of a file: checks every name and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional

from capd_client.errors import ConfigError
from capd_client.formats.spec import FORMATS, OPTIONS
from capd_client.recipes.linear_recipe import (
    OPERANDS,
    PRODUCTS,
    RAW,
    REQUANTISED,
    LinearRecipe,
    Operand,
    Product,
    Transform,
)

__all__ = ["is_linear_recipe", "parse_recipe"]

_NONE = "none"
_SIGNS = ("none", "te", "seeded")
_OPERAND_OPTIONS = tuple(name for name in OPTIONS if name not in ("axis", "preset"))
_MOST_NAME_CHARS = 64


def is_linear_recipe(given: Any) -> bool:
    """Return whether these are the tables of a recipe by products."""
    return isinstance(given, Mapping) and any(name in given for name in PRODUCTS)


def parse_recipe(given: Mapping[str, Any], name: str = "recipe") -> LinearRecipe:
    """Return the recipe of its tables.

    Args:
        given: `name`, `mask`, and the tables fprop, dgrad and wgrad.
        name: The name of a recipe that has none of its own.

    Raises:
        ConfigError: A name is unknown, a value is not allowed, or the recipe cannot be. The message names the place.
    """
    _check_names("the recipe", given, ("name", "mask", *PRODUCTS))
    name = given.get("name", name)
    if not isinstance(name, str) or not name or len(name) > _MOST_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"the name of a recipe cannot be {name!r:.80}; it is a text of 1 to {_MOST_NAME_CHARS} printable characters"
        )
    mask = given.get("mask", False)
    if not isinstance(mask, bool):
        raise ConfigError(f"recipe {name}: mask cannot be {mask!r}; allowed are true, false")
    products = {product: _product(given.get(product, {}), name, product) for product in PRODUCTS}
    return LinearRecipe(name, **products, mask=mask)


def _product(given: Any, name: str, product: str) -> Product:
    where = f"recipe {name}, {product}"
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where} cannot be {given!r:.80}; it is a table with {', '.join(OPERANDS[product])}, transform"
        )
    _check_names(where, given, (*OPERANDS[product], "transform"))
    a, b = (_operand(given.get(operand), f"{where}.{operand}") for operand in OPERANDS[product])
    return Product(a, b, _transform(given.get("transform"), f"{where}.transform"))


def _operand(given: Any, where: str) -> Optional[Operand]:
    if given is None or given == _NONE:
        return None
    table = {"format": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{where} cannot be {given!r:.80}; it is a format's name, or a table with format and its options"
        )
    _check_names(where, table, ("format", "source", *_OPERAND_OPTIONS))
    fmt = table.get("format")
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ConfigError(
            f"{where}: the format cannot be {fmt!r:.80}; allowed are {_NONE}, {', '.join(FORMATS)}"
        )
    source = table.get("source", RAW)
    if source not in (RAW, REQUANTISED):
        raise ConfigError(f"{where}: source cannot be {source!r:.80}; allowed are {RAW}, {REQUANTISED}")
    options = tuple(
        (name, tuple(table[name]) if isinstance(table[name], list) else table[name])
        for name in _OPERAND_OPTIONS
        if table.get(name) is not None
    )
    return Operand(fmt, options, source)


def _transform(given: Any, where: str) -> Optional[Transform]:
    if given is None or given == _NONE:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} cannot be {given!r:.80}; it is a table with kind, size, signs and round")
    _check_names(where, given, ("kind", "size", "signs", "round", "axis"))
    size, signs, round_to = given.get("size"), given.get("signs", "none"), given.get("round", "")
    allowed = (
        ("kind", given.get("kind", "hadamard"), ("hadamard",)),
        ("axis", given.get("axis", "contraction"), ("contraction",)),
        ("size", size, (2, 4, 8, 16, 32, 64, 128)),
        ("signs", signs, _SIGNS),
        ("round", round_to, ("", "bf16")),
    )
    for name, value, known in allowed:
        if isinstance(value, bool) or value not in known:
            raise ConfigError(
                f"{where}: {name} cannot be {value!r:.80}; allowed are {', '.join(map(str, filter(None, known)))}"
            )
    if signs == "te" and size != 16:
        raise ConfigError(f"{where}: the signs te are for size 16, not {size}")
    return Transform(int(size or 0), signs, round_to)


def _check_names(where: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    unknown = [name for name in given if name not in tuple(allowed)]
    if unknown:
        raise ConfigError(f"{where} has no {str(unknown[0])[:64]!r}; it has {', '.join(allowed)}")
