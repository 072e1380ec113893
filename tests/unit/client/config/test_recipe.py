"""What a recipe may say, and what it says back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from capd_client.config.recipe import QuantSpec, Recipe
from capd_client.errors import ConfigError

RECIPES: list[Any] = [
    "mxfp8",
    "none",
    {"linear": "hifp8", "qk": "none", "pv": "nvfp4"},
    {"linear": {"format": "mxfp4", "backward": {"format": "mxfp8", "elem": "e5m2", "scale_mode": "rceil"}}},
    {
        "linear": {
            "format": "nvfp4",
            "weight": {"format": "nvfp4", "block": [16, 16]},
            "gradient_rounding": "stochastic",
        }
    },
    {"linear": {"format": "fp8", "block": 128}, "backward": "none", "level": "exact", "qk": "fp8"},
    {"linear": {"format": "mxfp8", "preset": "legacy"}, "include": "layers.*", "exclude": ["head", "*.0"]},
    {"linear": {"format": "bf16", "overflow": "saturate"}},
]


@pytest.mark.parametrize("given", RECIPES, ids=str)
def test_a_recipe_reads_its_own_text(given: Any) -> None:
    recipe = Recipe.of(given)

    assert Recipe.of(recipe.text()) == recipe
    assert Recipe.of(recipe) is recipe
    assert Recipe.of(recipe.text()).text() == recipe.text()


def test_a_word_goes_to_all_three() -> None:
    recipe = Recipe.of("mxfp8")

    assert recipe.linear == recipe.qk == recipe.pv == QuantSpec.of("mxfp8")
    assert recipe.parts == ("linear", "qk", "pv")


def test_the_text_has_every_option_settled() -> None:
    spec = {
        "backward": "same",
        "block": 32,
        "elem": "e4m3",
        "format": "mxfp8",
        "rounding": "even",
        "scale_mode": "floor",
    }

    assert json.loads(Recipe.of("mxfp8").text()) == {
        "level": "straight-through", "linear": spec, "qk": spec, "pv": spec
    }  # fmt: skip
    assert Recipe.of("none").text() == "none"


@pytest.mark.parametrize("word", ["none", "bf16", "fp16", "fp32"])
def test_the_words_of_plain_runs_are_none(word: str) -> None:
    assert Recipe.of(word).is_none
    assert Recipe.of({"linear": word}).is_none


def test_a_backward_of_the_recipe_is_that_of_every_part_without_its_own() -> None:
    recipe = Recipe.of(
        {"linear": {"format": "mxfp4", "backward": "none"}, "qk": "mxfp4", "backward": "mxfp8"}
    )

    assert recipe.linear is not None
    assert recipe.qk is not None
    assert recipe.linear.backward_spec is None
    assert recipe.qk.backward_spec == QuantSpec.of("mxfp8")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "mxfp9",
            "linear: the format cannot be 'mxfp9'; allowed are none, bf16, fp16, fp8, mxfp8, mxfp6, mxfp4, nvfp4",
        ),
        ({"lin": "mxfp8"}, "the recipe has no 'lin'; it has linear, qk, pv, level"),
        ({"format": "mxfp8"}, "names its parts"),
        ({"linear": {"format": "mxfp8", "axis": 0}}, "linear has no 'axis'; it has format, elem, block"),
        (
            {"qk": {"format": "mxfp8", "scale_mode": "up"}},
            "qk: scale_mode of mxfp8 cannot be 'up'; allowed are floor",
        ),
        (
            {"linear": {"format": "mxfp8", "backward": "sane"}},
            "linear.backward cannot be 'sane'; allowed are none, same",
        ),
        (
            {"linear": {"format": "mxfp8", "backward": {"format": "mxfp8", "backward": "none"}}},
            "no backward of its own",
        ),
        (
            {"linear": {"format": "mxfp8", "gradient_rounding": "up"}},
            "linear.gradient_rounding: rounding of mxfp8",
        ),
        ({"linear": {"format": "mxfp8", "backward": "none", "gradient_rounding": "even"}}, "no effect"),
        (
            {"linear": {"format": "mxfp8", "weight": "none"}},
            "linear.weight: the format cannot be 'none'; allowed are bf16",
        ),
        ({"qk": {"format": "mxfp8", "weight": "mxfp4"}}, "qk: only linear can have a weight"),
        (
            {"pv": {"format": "mxfp8", "backward": {"format": "mxfp8", "weight": "mxfp4"}}},
            "pv: only linear can have a weight",
        ),
        ({"linear": 8}, "linear cannot be 8"),
        ({"level": "deep"}, "level cannot be 'deep'; allowed are straight-through, exact"),
        ({"include": [3]}, "include cannot be"),
        ({"exclude": ["\n"]}, "exclude: "),
        (8, "a recipe cannot be 8"),
        ("{", "no JSON"),
        ("[" * 9, "linear: the format cannot be"),
        ('{"linear": ' + '"x"' * 9000, "at most 16384 characters"),
        ('{"linear":' + "[" * 5000, "no JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_read_is_refused_with_what_is_allowed(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Recipe.of(given)

    assert said in str(refused.value)


def test_recipes_and_formats_are_read_without_torch() -> None:
    code = (
        "import sys\nfrom capd_client.emulation import Recipe\nimport capd_client.formats\n"
        "Recipe.of('mxfp8').text()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
