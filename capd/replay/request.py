"""What a replay is asked for: the recipes, the products, the draws and the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capd.errors import ConfigError
from capd.replay.recipes import OPERANDS_OF, ReplayRecipe

__all__ = ["ROWS_STEP", "TITLES", "ReplayRequest", "checked_products", "checked_rows"]

TITLES = {"y": "Y", "dx": "dX", "dw": "dW"}
"""The products as tables and figures name them."""
ROWS_STEP = 128
"""Tokens are taken in whole blocks of so many, so that no block of a format along tokens is cut."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What is to be replayed.

    Attributes:
        recipes: The recipes.
        products: The products, of "y", "dx" and "dw".
        draws: The draws of a product that is rounded at random.
        seed: The seed of the first draw.
        rows: The most tokens of a call that are replayed.
        blame: Whether errors are attributed to operands.
        is_logical: Whether operands are put together from all ranks.
    """

    recipes: Sequence[ReplayRecipe]
    products: Sequence[str] = tuple(OPERANDS_OF)
    draws: int = 1
    seed: int = 0
    rows: int = 4096
    blame: bool = False
    is_logical: bool = False


def checked_products(text: str) -> tuple[str, ...]:
    """Return the products that --product names, in their usual order. Raises ConfigError for an unknown one."""
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in OPERANDS_OF:
            raise ConfigError(f"--product: {word!r} is no product; use {', '.join(OPERANDS_OF)}")
    return tuple(product for product in OPERANDS_OF if product in words)


def checked_rows(rows: int) -> int:
    """Return the number of rows. Raises ConfigError if it is no multiple of `ROWS_STEP`."""
    if rows < ROWS_STEP or rows % ROWS_STEP:
        raise ConfigError(
            f"--rows {rows}: tokens are taken in whole blocks of {ROWS_STEP}; give a multiple of it"
        )
    return rows
