"""capd.toml for the job: the command line refuses exactly what the training process refuses, and names all of it."""

from __future__ import annotations

from datetime import date
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from capd.job_settings import problems_of
from capd_client.config.file import FileSettings, WhenSettings, parse_settings
from capd_client.config.settings import check_file_value
from capd_client.errors import ConfigError
from capd_client.rules.schema import RuleSettings

RANGES = st.sampled_from(["0-2,100-:100", "all", "0-90:10", "7", 3])
SLICES = st.sampled_from(["first:64", "stride:8", "tokens:0-127@0"])
FORWARD = st.sampled_from(["input", "weight", "output"])


def one_or_more(texts: st.SearchStrategy[str]) -> st.SearchStrategy[object]:
    return st.one_of(texts, st.lists(texts, min_size=1, max_size=3))


def tables(required: dict[str, object], **fields: object) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(required, optional=fields)


RULES = tables(
    {},
    include=one_or_more(st.sampled_from([r"mlp\.(up|down)", ".*", r"^layers\.\d+"])),
    exclude=one_or_more(st.sampled_from(["lm_head", r"\.0\."])),
    layers=RANGES,
    components=one_or_more(st.sampled_from(["linear", "FA"])),
    tensors=one_or_more(FORWARD),
    operations=st.sampled_from(["forward", ["forward", "backward"]]),
    slices=st.one_of(SLICES, st.dictionaries(FORWARD, SLICES, min_size=1)),
    store=st.sampled_from(["full", "stats", "both"]),
    steps=RANGES,
    micro_batches=RANGES,
    ranks=RANGES,
)
DOCUMENTS = tables(
    {},
    quant_type=st.just("mxfp8"),
    policy=st.sampled_from(["drop", "block"]),
    mode=st.sampled_from(["stats", "sample:1/8"]),
    slice=SLICES,
    max_block_ms=st.sampled_from([5, 2.5]),
    arena_bytes=st.sampled_from([1 << 20, "1GB"]),
    max_mb_per_step=st.sampled_from([5, 2.5, "1GB"]),
    max_d2h_gbps=st.sampled_from([5, 2.5, "1GB"]),
    ring_bytes=st.sampled_from([1 << 20, "1GB"]),
    piece_bytes=st.sampled_from([1 << 20, "16MiB"]),
    snapshot=st.sampled_from(["always", "auto"]),
    ring=st.sampled_from(["wait", "drop"]),
    exit_timeout_s=st.sampled_from([5, 2.5]),
    when=tables({}, steps=RANGES, micro_batches=RANGES, ranks=RANGES),
    rule=st.lists(RULES, max_size=3),
    daemon=st.just({"threads": 2}),
)
ODD = st.sampled_from(
    [
        None, True, False, 0, 3, -1, 2**63, 1.0, 2.5, float("nan"), float("inf"), "", "x", "1.0", "3", "true", "all",
        "first:1", "full", "input", "grad_output", "forward", "linear", "drop", "new\nline", "(", "(a+)+", "a*" * 9,
        "x" * 64, "x" * 65, "x" * 257, "1" * 257, b"x", date(2026, 1, 1), [], [1], ["input"], ["x"] * 65, [["x"]], [{}],
        [{}] * 33, [{"name": "2"}, {}], {}, {"input": "first:1"}, {"query": "x"}, {"x": 1},
    ]
)  # fmt: skip
KEYS = {
    "": [*FileSettings.__struct_fields__, "rules"],
    "when": [*WhenSettings.__struct_fields__, "step"],
    "rule": [*RuleSettings.__struct_fields__, "layer"],
}


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, object]:
    """A document with one value, at any place, that may be anything."""
    document = draw(DOCUMENTS)
    table = draw(st.sampled_from(sorted(KEYS)))
    at: Any = document
    if table == "when":
        at = document.setdefault("when", {})
    elif table == "rule":
        rules: Any = document.setdefault("rule", [])
        rules.append({})
        at = rules[-1]
    at[draw(st.sampled_from(KEYS[table]))] = draw(ODD)
    return document


def job_takes(document: dict[str, object]) -> bool:
    try:
        for key, value in parse_settings(document).items():
            check_file_value(key, value)
    except ConfigError:
        return False
    return True


@given(DOCUMENTS)
def test_both_take_what_is_right(document: dict[str, object]) -> None:
    assert problems_of(document) == []
    assert job_takes(document)


@settings(max_examples=300)
@given(nearly_right())
@example({"rule": [{"include": "mlp", "tensors": ["input", "output"], "store": "both", "steps": 3}]})
@example({"rule": [{"operations": "forward", "tensors": "grad_output"}]})
@example({"rule": [{"name": "2"}, {}]})
@example({"policy": "block", "max_block_ms": 5, "when": {"steps": "all"}, "daemon": {"x": 1}})
def test_the_command_line_refuses_exactly_what_the_job_cannot_use(document: dict[str, object]) -> None:
    assert (problems_of(document) == []) == job_takes(document)


def test_every_problem_of_a_file_is_named_at_once() -> None:
    found = problems_of(
        {
            "policy": "blok",
            "polcy": 1,
            "when": {"steps": "x", "step": 1},
            "rule": [
                {"tensor": "input"},
                {"name": "mlp", "include": "("},
                {"layers": [1], "stroe": 1},
                {"store": "ful", "tensors": "inptu", "slices": "frist:3", "layers": "a-b"},
            ],
        }
    )

    assert sorted(found) == [
        "policy: 'blok' is not supported; supported: drop, block, thin, stats",
        "rule '3': layers: Expected `int | str | null`, got `array`",
        'rule \'4\': layers: cannot read \'a-b\' as a range; write "all", "3", "0-2", "100-" or "100-:100"',
        'rule \'4\': slices: cannot read \'frist:3\' as a slice; write "first:64", "stride:8" or "tokens:0-127", '
        'and "@1" after it for another axis',
        "rule '4': store: 'ful' is unknown; did you mean full?",
        "rule '4': tensors: 'inptu' is unknown; did you mean input?",
        "rule 'mlp': '(' is not a regular expression: missing ), unterminated subpattern at position 0",
        "unknown setting polcy; did you mean policy?",
        "unknown setting stroe in rule '3'; did you mean store?",
        "unknown setting tensor in rule '1'; did you mean tensors?",
        "unknown setting when.step; did you mean when.steps?",
        """when.steps: cannot read 'x' as a range; write "all", "3", "0-2", "100-" or "100-:100\"""",
    ]
