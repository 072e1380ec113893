"""The options that choose series by their keys: the same ones, in the same order, for every verb that has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.store.cli import Result

Capd = Callable[..., Result]

OPTIONS = [
    "--quant-type", "--rank", "--layer", "--phase", "--layer-type", "--component", "--operation", "--tensor",
    "--module",
]  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [
        ("ls", "--run", "--limit"),
        ("export", "--repeat-weights", "--jobs"),
        ("compare", "--layer-base", "--sample"),
        ("report", "--layer-base", "--sample"),
        ("plot", "--layer-base", "--sample"),
    ],
)
def test_a_verb_lists_the_options_in_one_place(capd: Capd, verb: str, before: str, after: str) -> None:
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capd(verb, "--help").out, re.MULTILINE)

    start = listed.index("--quant-type")
    assert listed[start - 1 : start + len(OPTIONS) + 1] == [before, *OPTIONS, after]


def test_every_option_narrows_the_choice_and_words_of_one_option_widen_it(capd: Capd, second: Path) -> None:
    everything = capd("ls", second, "--json").json
    one = everything[0]
    flags = {
        "--quant-type": "quant_type", "--rank": "rank", "--layer": "layer", "--phase": "phase",
        "--layer-type": "layer_type", "--component": "component", "--operation": "operation",
        "--tensor": "tensor_name", "--module": "module",
    }  # fmt: skip

    assert list(flags) == OPTIONS
    for flag, field in flags.items():
        wanted = str(one[field]) if one[field] is not None else "none"
        found = capd("ls", second, flag, wanted, "--json").json
        assert found == [row for row in everything if row[field] == one[field]], flag
    types = sorted({row["tensor_name"] for row in everything})
    two = capd("ls", second, "--tensor", types[0], "--tensor", types[1], "--json").json
    assert two == [row for row in everything if row["tensor_name"] in types[:2]]


def test_a_range_that_cannot_be_read_is_a_usage_error(capd: Capd, second: Path) -> None:
    found = capd("ls", second, "--rank", "x")

    assert found.code == 2
    assert "cannot read 'x' as a range" in found.err
