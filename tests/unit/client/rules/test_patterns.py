"""Regular expressions over module names: unbounded ones are refused, the others are accepted."""

from __future__ import annotations

import warnings

import pytest

from capd_client.errors import ConfigError
from capd_client.rules.patterns import MAX_PATTERN_CHARS, MAX_REPETITIONS, compile_pattern

NAME = "model.layers.12.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"mlp\.(gate|up)_proj", False),
        (r"layers\.(1[0-5]|2)\.", True),
        (r"^model\.layers\.\d+\..*experts\.\d+\.gate_proj$", True),
        (r"(?i)MLP", True),
        (r"(layers\.\d+\.)?mlp", True),
        (r"(?:abc)+|gate", True),
        (r"[(]a+[)]+", False),
        (r"[]a+]*b", False),
        (r"\(a+\)*x", False),
        (r"(?P<part>gate)_(?=proj)", True),
        (r"experts\.\d{1,3}\.", True),
        (".*?" * MAX_REPETITIONS, True),
    ],
)
def test_what_people_write_is_taken_and_searched_for(text: str, found: bool) -> None:
    assert bool(compile_pattern(text).search(NAME)) == found


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$", "(a*)*", "(a|a)*$", "(a|aa)+$", "(?:a?){50}", "((a+)b?)*", "(?P<x>.*)+", r"(\w+\.)*",
        "(([a-z])+.)+[A-Z]", "(a{2})+", "((a|b)c)*",
    ],
)  # fmt: skip
def test_a_repeated_group_with_a_choice_inside_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="can take forever"):
        compile_pattern(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "1 to 256 characters"),
        ("x" * (MAX_PATTERN_CHARS + 1), "not 257"),
        ("a*" * (MAX_REPETITIONS + 1), "9 repetitions"),
        ("a?" * 100 + "a" * 50, "100 repetitions"),
        ("mlp(", "is not a regular expression"),
        ("[", "is not a regular expression"),
        ("a{99999999999999999999}", "is not a regular expression"),
        ("(" * 120 + ")" * 120, None),
    ],
)
def test_limits_and_nonsense(text: str, said: str | None) -> None:
    if said is None:
        compile_pattern(text)
        return
    with pytest.raises(ConfigError, match=said):
        compile_pattern(text)


def test_a_warning_of_python_is_an_error_that_is_said_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="nested set"):
            compile_pattern("[[a]")
