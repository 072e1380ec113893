"""Recipes as data: presets, files, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from capd_client.config.recipe import Recipe
from capd_client.errors import ConfigError
from capd_client.recipes.find import preset, recipe_of_file
from capd_client.recipes.linear_recipe import LinearRecipe
from capd_client.recipes.parse import parse_recipe
from capd_client.recipes.presets import PRESETS

FILE = """
[recipe]
name = "mine"
[recipe.fprop]
x = {format = "nvfp4"}
w = {format = "nvfp4", block = [16, 16]}
[recipe.wgrad]
transform = {kind = "hadamard", size = 16, signs = "te", axis = "contraction", round = "bf16"}
x = "mxfp8"
g = {format = "nvfp4", rounding = "stochastic"}
"""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_back_from_its_text(name: str) -> None:
    recipe = preset(name)

    assert recipe.name == name
    assert parse_recipe(json.loads(recipe.text())) == recipe
    assert Recipe.of(Recipe.of(name).text()) == Recipe.of(name)
    assert Recipe.of(name).linear == recipe
    assert Recipe.of(name).parts == ("linear",)


def test_a_file_has_the_tables_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(FILE)

    recipe = recipe_of_file(str(file))

    assert recipe.name == "mine"
    assert recipe.fprop.b is not None
    assert recipe.fprop.b.spec.block == (16, 16)
    assert recipe.dgrad.a is None
    assert recipe.wgrad.transform is not None
    assert (recipe.wgrad.transform.size, recipe.wgrad.transform.signs) == (16, "te")
    assert Recipe.of(str(file)).linear == recipe


def test_a_recipe_may_be_of_some_modules_and_beside_formats_of_attention() -> None:
    recipe = Recipe.of({"linear": "nvfp4-te", "qk": "mxfp8", "exclude": "lm_head"})

    assert isinstance(recipe.linear, LinearRecipe)
    assert recipe.parts == ("linear", "qk")
    assert Recipe.of(recipe.text()) == recipe


STD = {"format": "mxfp4", "scale_mode": "std"}
EDEN = {"format": "nvfp4", "rounding": "eden"}
TURN = {"kind": "hadamard", "size": 128, "signs": "seeded"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fprop": {"x": "nvfp5"}}, r"fprop.x: the format cannot be 'nvfp5'; allowed are none, bf16"),
    ({"fprop": {"g": "nvfp4"}}, r"fprop has no 'g'; it has x, w, transform"),
    ({"fprop": 3}, "it is a table with x, w, transform"),
    ({"fprop": {"x": 3}}, "it is a format's name, or a table"),
    ({"gemm": {}}, "the recipe has no 'gemm'"),
    ({"fprop": {"x": {"format": "nvfp4", "blocks": 16}}}, "has no 'blocks'"),
    ({"fprop": {"x": {"format": "mxfp8", "block": 64, "outer": 128}}}, "mxfp8 takes no outer"),
    ({"fprop": {"x": {"format": "nvfp4", "source": "requantised"}}}, "only x and w of dgrad and wgrad"),
    ({"dgrad": {"w": {"format": "nvfp4", "source": "requantised"}}}, "fprop.w has no format"),
    ({"dgrad": {"w": {"format": "nvfp4", "source": "twice"}}}, "allowed are raw, requantised"),
    ({"dgrad": {"g": EDEN}}, "needs a transform of size 128"),
    ({"dgrad": {"g": EDEN, "transform": {**TURN, "size": 64}}}, "needs a transform of size 128"),
    ({"dgrad": {"transform": {"size": 24}}}, "size cannot be 24"),
    ({"dgrad": {"transform": {"size": True}}}, "size cannot be True"),
    ({"dgrad": {"transform": {"size": 32, "signs": "te"}}}, "for size 16, not 32"),
    ({"dgrad": {"transform": {"size": 32, "axis": "rows"}}}, "allowed are contraction"),
    ({"dgrad": {"transform": "hadamard"}}, "it is a table with kind"),
    ({"fprop": {"x": {"format": "nvfp4", "four_over_six": "mae", "rounding": "stochastic"}}}, "rounds to nearest"),
    ({"mask": True, "fprop": {"x": STD}}, 'mask needs scale_mode = "std"'),
    ({"mask": "yes", "fprop": {}}, "allowed are true, false"),
    ({"mask": True, "fprop": {"x": STD, "w": STD, "transform": TURN}}, "signs are not seeded"),
    ({"name": "", "fprop": {}}, "the name of a recipe"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "says"), REFUSED)
def test_a_recipe_that_cannot_be_is_refused_with_its_place(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_recipe(tables)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x = [", "is no TOML"), ("x = 1" + "0" * 5000, "is no TOML"), ("[other]\na = 1", "must have one table"),
        ("[recipe.fprop]\nx = 'no'", "own.toml: recipe own"),
        ("#" * 70_000, "more than 65536 bytes"), (None, "cannot be read"), ("[[recipe]]", "recipe, which is no table"),
        ("", "it has none"), ('[recipe]\nname = "a\\u001b"', "of 1 to 64 printable characters"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    file = tmp_path / "own.toml"
    if content is not None:
        file.write_text(content)

    with pytest.raises(ConfigError, match=says):
        recipe_of_file(str(file))


def test_attention_takes_no_recipe_of_products() -> None:
    with pytest.raises(ConfigError, match="of linear alone"):
        Recipe.of({"qk": "nvfp4-te"})


def test_a_recipe_within_a_recipe_names_no_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(FILE)

    with pytest.raises(ConfigError, match="the format cannot be"):
        Recipe.of(json.dumps({"linear": str(file)}))


def test_a_pipe_is_refused_before_anything_waits_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "own.toml"
    os.mkfifo(pipe)

    with pytest.raises(ConfigError, match="is a pipe"):
        recipe_of_file(str(pipe))
