"""Finds a recipe by the name of a preset, or in a file."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

from capd_client.errors import ConfigError
from capd_client.recipes.linear_recipe import LinearRecipe
from capd_client.recipes.parse import parse_recipe
from capd_client.recipes.presets import PRESETS

__all__ = ["is_recipe_file", "preset", "recipe_of_file"]

_MOST_NBYTES = 64 << 10
_MOST_CHARS = 300


@lru_cache(maxsize=32)
def preset(name: str) -> LinearRecipe:
    """Return the preset of a name, which is one of PRESETS."""
    return parse_recipe(PRESETS[name], name)


def is_recipe_file(text: str) -> bool:
    """Return whether a text is the path of a recipe's file."""
    return text.endswith(".toml")


def recipe_of_file(path: str) -> LinearRecipe:
    """Return the recipe in the table `recipe` of a TOML file of at most 64 KiB. It needs Python 3.11.

    Raises:
        ConfigError: The file cannot be read, is no such file, or its recipe cannot be. The message names the file.
    """
    try:
        import tomllib
    except ImportError:
        raise ConfigError(
            f"{path}: a recipe's file needs Python 3.11 or newer; give the recipe as JSON"
        ) from None
    try:
        # Opening a pipe would wait for its writer.
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise ConfigError(f"{path} is a pipe; write the recipe to a file")
        with Path(path).open("rb") as file:
            content = file.read(_MOST_NBYTES + 1)
        if len(content) > _MOST_NBYTES:
            raise ConfigError(f"{path} has more than {_MOST_NBYTES} bytes, so it is no recipe")
        found: Any = tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    # A number of thousands of digits is a ValueError, too.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    table = found.get("recipe")
    if not isinstance(table, dict) or len(found) != 1:
        names = ", ".join(found) if table is None or len(found) != 1 else "recipe, which is no table"
        raise ConfigError(f"{path} must have one table, [recipe]; it has {names or 'none'}"[:_MOST_CHARS])
    try:
        return parse_recipe(table, Path(path).stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
