"""The tables [[trigger]]: what is wrong with one is said with the table, the key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capd.analyze.grids import grids
from capd.config import load_triggers, read_file
from capd.errors import ConfigError
from capd.rules.format_errors import MEASURED_FORMATS
from capd.rules.ranges import FORMAT_RANGES
from capd.rules.refusals import refusals
from capd.rules.schema import MAX_TRIGGERS, parse_triggers, trigger_problems
from capd.rules.words import rule_text
from capd_client.config.file import parse_settings

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metric": "nann"}, "'nann' is unknown; did you mean nan?"),
    ({"metric": "quality"}, "known: nan, inf, absmax"),
    ({"metric": "underflow"}, "did you mean underflow:FORMAT?"),
    ({"metric": "underflow:e4m4"}, "names no format; did you mean e4m3?"),
    ({"metric": "near_max:mxfp4"}, "write near_max:e2m1"),
    ({"metric": "underflow:mxfp9"}, "with [lab] also fp8, mxfp8"),
    ({"metric": "sqnr"}, "did you mean sqnr:FORMAT?"),
    ({"metric": "sqnr:mxpf8"}, "did you mean sqnr:mxfp8? known: bf16, fp16, fp8, mxfp8"),
    ({"metric": "flushed:e4m3"}, "names no format of [lab] that has it; known: bf16, fp16, fp8"),
    ({"metric": "scale_std:hifp8"}, "known: fp8, mxfp8, mxfp6, mxfp4, nvfp4, hif4, with options as in [lab]"),
    ({"metric": "relative_error:mxfp8:\n"}, "names no format"),
    ({"metric": "saturation:mxfp8", "above": 1}, "never above 1"),
    ({"metric": "sqnr:mxfp8", "above": None, "factor_above": 2}, "better the larger it is; give below"),
    ({"metric": "underflow:bf16"}, "known: e4m3, e5m2"),
    ({"metric": "exponent:2"}, "a number from 0 to 1"),
    ({"metric": "scalar:"}, "names no scalar"),
    ({"abov": 1}, "unknown setting abov; did you mean above?"),
    ({"above": None}, "above: missing; give above, below or factor_above"),
    ({"above": "1"}, "above: Expected `int | float | null`, got `str`"),
    ({"above": float("nan")}, "above: a finite number"),
    ({"above": 1, "below": 2}, "every value is above 1 or below 2"),
    ({"metric": "zeros", "above": 1}, "zeros is never above 1"),
    ({"above": -1}, "nan is always above -1"),
    ({"above": None, "below": 0}, "nan is never below 0"),
    ({"metric": "absmax", "factor_above": 2}, "factor_above: a rule has it, or above and below"),
    ({"above": None, "factor_above": 1}, "a number above 1, not 1"),
    ({"above": None, "metric": "silent", "factor_above": 2}, "silent has no baseline"),
    ({"above": None, "factor_above": 2, "baseline": {"min": 60}}, "min = 60 is more than iterations = 50"),
    ({"above": None, "factor_above": 2, "baseline": {"statistic": "mean"}}, "known: median"),
    ({"baseline": {}}, "baseline: it needs factor_above"),
    ({"tensors": "grad_outpt"}, "did you mean grad_output?"),
    ({"tensors": "grad_output", "operations": "forward"}, "belongs to backward"),
    ({"layers": "3-1"}, "layers: range '3-1' is empty"),
    ({"include": "(a+)+"}, "repeats a group"),
    ({"phases": "mid"}, "known: pre, post"),
    ({"series": []}, "1 to 64 globs"),
    ({"metric": "silent", "layers": 1}, "silent is selected by ranks alone"),
    ({"metric": "scalar:loss", "tensors": "input"}, "selected by steps and ranks alone"),
    ({"metric": "drops", "for": 2}, "drops counts no records"),
    ({"for": 0}, "for: Expected `int` >= 1"),
    ({"cooldown": -1}, "cooldown: Expected `int` >= 0"),
    ({"severity": "bad"}, "known: info, warning, critical"),
    ({"action": "stop"}, "known: warn, keep, capture, stop-capture"),
    ({"post": 3}, 'post: it needs action = "keep"'),
    ({"action": "capture", "post": 3}, 'post: it needs action = "keep"'),
    ({"action": "keep", "post": -1}, "post: Expected `int` >= 0"),
    ({"command": "rm -rf /"}, "command: Expected `array | null`, got `str`"),
    ({"command": []}, "a list of a program and its arguments"),
    ({"command": ["a\0"]}, "no NUL"),
    ({"name": ""}, "name: 1 to 64 printable characters"),
]  # fmt: skip


def rule(**changes: Any) -> dict[str, Any]:
    """A table; a key of None is absent."""
    table = {"name": "mine", "metric": "nan", "above": 0, **changes}
    return {key: value for key, value in table.items() if value is not None}


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=str)
def test_a_wrong_table_is_named_with_its_key_and_what_is_allowed(changes: dict[str, Any], said: str) -> None:
    [problem] = trigger_problems([rule(), rule(**{"name": "bad", **changes})])
    label = "'bad'" if changes.get("name") is None else "'2'"
    assert problem.startswith(f"trigger {label}: ")
    assert said in problem
    assert "\n" not in problem


def test_all_problems_are_listed_and_a_start_names_the_first(tmp_path: Path) -> None:
    file = tmp_path / "capd.toml"
    file.write_text(
        '[[trigger]]\nname = "a"\nmetric = "nan"\nabove = 0\nfor = 0\n'
        '[[trigger]]\nname = "a"\nmetric = "x"\nabove = 1\n'
    )
    problems = read_file(file)[1]
    assert [one.removeprefix(f"{file}: ") for one in problems] == [
        "trigger 'a': for: Expected `int` >= 1",
        f"trigger 'a': metric: 'x' is unknown; {problems[1].partition('; ')[2]}",
        "trigger 'a': name: two triggers have this name",
    ]
    with pytest.raises(ConfigError, match=r"capd\.toml: trigger 'a': for: .*and 2 more"):
        load_triggers({}, file)


def test_what_is_no_list_of_tables_or_too_many_is_refused() -> None:
    assert trigger_problems({"name": "x"}) == ["trigger: a list of tables; write [[trigger]]"]
    assert trigger_problems(["x"]) == ["trigger 1: a table, not str"]
    many = [rule(name=str(number)) for number in range(MAX_TRIGGERS + 1)]
    assert trigger_problems(many) == ["trigger: 33 tables; at most 32 are allowed"]
    assert trigger_problems(many[:-1]) == []


def test_the_training_job_ignores_the_tables() -> None:
    assert "trigger" not in parse_settings({"trigger": [{"name": "x", "unknown": 1}]})


def test_a_rule_in_words_has_its_condition_and_its_selection() -> None:
    [found] = parse_triggers(
        [
            rule(
                metric="underflow:e4m3", above=0.5, tensors=["input", "weight"], layers="0-3", **{"for": 3},
                cooldown=7, max_per_day=2, severity="critical", command=["mail", "me"],
            )
        ]
    )  # fmt: skip
    assert rule_text(found) == (
        "mine: critical if underflow:e4m3 above 0.5 in a tensor (layers 0-3; tensors input, weight), 3 records in a "
        "row; then quiet for 7 iterations, at most 2 a day, and runs mail. underflow:e4m3 is the share of values with "
        "0 < |x| < 2^-9, the smallest of e4m3."
    )


def test_the_ranges_are_those_of_the_formats() -> None:
    assert {name: (one.largest, one.normal, one.smallest) for name, one in FORMAT_RANGES.items()} == {
        name: (grid.largest, grid.normal, grid.smallest) for name, grid in grids().items()
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metric": "zeros", "above": None, "below": 1.5}, "is always below 1.5; it ends at 1"),
        ({"above": 10**400}, "above: a finite number, not 1000"),
        ({"above": None, "factor_above": 10**400}, "factor_above: a finite number"),
        (
            {"metric": "rms", "above": None, "factor_above": 2, "baseline": {"min_delta": 10**400}},
            "min_delta: a number from 0",
        ),
    ],
)
def test_limits_that_always_hold_or_are_no_number_of_a_computer_are_refused(
    changes: dict[str, object], says: str
) -> None:
    table = {"name": "x", "metric": "nan", "above": 0, **changes}
    [problem] = trigger_problems([{name: value for name, value in table.items() if value is not None}])
    assert says in problem


def test_formats_that_rules_name_are_those_that_a_lab_measures() -> None:
    from capd_client.formats.spec import FORMATS

    assert tuple(FORMATS) == MEASURED_FORMATS


def test_errors_of_a_format_need_it_in_the_lab_and_no_statistics() -> None:
    rules = parse_triggers(
        [
            rule(name="a", metric="sqnr:mxfp8", above=None, below=20),
            rule(name="b", metric="underflow:nvfp4:16x16", above=0.5),
            rule(name="c", metric="underflow:mxfp4", above=0.5),
            rule(name="d", metric="underflow:hifp8", above=0.5),
        ]
    )
    has = ("mxfp8", "nvfp4:16x16", "mxfp4")
    assert refusals(rules[:3], statistics=False, keeps=False, lab_formats=has) == []
    assert refusals(rules, statistics=True, keeps=False, lab_formats=("hifp8", "mxfp8:e5m2")) == [
        "trigger 'a': metric: sqnr:mxfp8 needs mxfp8 in [lab] formats; it has hifp8, mxfp8:e5m2",
        "trigger 'b': metric: underflow:nvfp4:16x16 needs nvfp4:16x16 in [lab] formats; it has hifp8, mxfp8:e5m2; "
        "underflow:e2m1 counts without a scale",
        "trigger 'c': metric: underflow:mxfp4 needs mxfp4 in [lab] formats; it has hifp8, mxfp8:e5m2; underflow:e2m1 "
        "counts without a scale",
    ]
    # The histogram of exponents has the share of an element or of hifp8, on all records.
    assert refusals(rules[3:], statistics=True, keeps=False, lab_formats=()) == []
    assert refusals(rules[:1], statistics=True, keeps=False, lab_formats=()) == [
        "trigger 'a': metric: sqnr:mxfp8 needs mxfp8 in [lab] formats; it has none"
    ]


def test_a_file_whose_rule_and_lab_do_not_fit_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "capd.toml"
    text = '[lab]\nformats = ["{}"]\n[[trigger]]\nname = "low"\nmetric = "sqnr:mxfp8"\nbelow = 20\n'
    file.write_text(text.format("hifp8"))
    with pytest.raises(ConfigError, match=r"capd\.toml: trigger 'low': metric: sqnr:mxfp8 needs mxfp8 in"):
        load_triggers({}, file)
    file.write_text(text.format("mxfp8"))
    assert [one.name for one in load_triggers({}, file)] == ["low"]
