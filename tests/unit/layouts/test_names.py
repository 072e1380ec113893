"""Maps between the names of frameworks: what is found, and what a file may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.errors import ConfigError
from capd.layouts.names import PRESETS, load_map

SOUND = """\
[left]
name = "a"
order = "sbh"

[[module]]
left = "layers.*.qkv"
right = ["blocks.*.q", "blocks.*.k", "blocks.*.v"]
split = "qkv"

[[module]]
left = "head"
right = "out"
"""


def test_wildcards_are_single_words_and_carry_over(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(SOUND, encoding="utf-8")
    names = load_map(str(path))
    [found] = names.counterparts("layers.12.qkv")
    assert (found.right, found.split) == (("blocks.12.q", "blocks.12.k", "blocks.12.v"), "qkv")
    assert names.counterparts("layers.1.2.qkv") == []
    assert names.counterparts("xlayers.1.qkv") == []
    assert (names.left.name, names.left.order, names.right.name, names.right.order) == (
        "a",
        "sbh",
        "right",
        "bsh",
    )


def test_the_direction_is_found_from_the_modules(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(SOUND, encoding="utf-8")
    names = load_map(str(path))
    assert names.is_left(["layers.0.qkv", "head"], ["blocks.0.q", "out"])
    assert not names.is_left(["blocks.0.q", "out"], ["layers.0.qkv", "head"])
    with pytest.raises(
        ConfigError, match=r"no module of one run is a's .* the first run has foo, the second bar"
    ):
        names.is_left(["foo"], ["bar"])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_and_cut_fused_modules(name: str) -> None:
    names = load_map(name)
    qkv = names.counterparts("decoder.layers.3.self_attention.linear_qkv")[-1]
    [gated] = names.counterparts("decoder.layers.3.mlp.linear_fc1")
    assert (len(qkv.right), qkv.split, len(gated.right), gated.split) == (3, "qkv", 2, "gated")
    assert all("layers.3." in module for module in (*qkv.right, *gated.right))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('order = "sbh"', 'order = "hbs"', r"line 3: left.order is 'hbs'"),
        ('name = "a"', "name = 3", r"line 2: left.name: use name, order and rotary"),
        ('split = "qkv"', 'split = "qk"', r"line 8: split is 'qk'; use one of none, qkv, gated"),
        ('split = "qkv"', 'splits = "qkv"', r"line 8: unknown key 'splits'"),
        ('split = "qkv"', 'split = "gated"', r"line 7: split gated needs 2 on the right, not 3"),
        ('"blocks.*.q", ', "", r"line 7: split qkv needs 3 or 1 on the right, not 2"),
        ('split = "qkv"', "", r"line 7: split none needs 1 on the right, not 3"),
        ('"blocks.*.q"', '"blocks.q"', r"line 7: 'blocks.q' has 0 wildcards, and 'layers.\*.qkv' has 1"),
        ('right = "out"', "right = 3", r"line 12: right must be a glob"),
        ('left = "head"', "", r"line 10: left must be a glob"),
        ("[left]", "[lefft]", r"line 1: unknown key 'lefft'"),
        ("[left]", "[left", r"line 1"),
    ],
)
def test_what_a_map_may_not_say_is_named_with_its_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "map.toml"
    assert old in SOUND
    path.write_text(SOUND.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        load_map(str(path))


def test_a_map_that_is_not_there_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="megatron-hf, megatron-torchtitan, or a TOML file"):
        load_map(str(tmp_path / "missing.toml"))
    (tmp_path / "empty.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"there is no \[\[module\]\]"):
        load_map(str(tmp_path / "empty.toml"))
