"""Rules against the modules of a model: what they capture, what each tensor becomes, and what is said of mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd_client.protocol.selection import Ranges
from capd_client.rules.problems import problems_of
from capd_client.rules.report import plan_lines, rank_problems
from capd_client.rules.resolve import Kept, Resolved, Rule, Target, When, resolve
from capd_client.rules.schema import parse_rules, rule_of_globs
from capd_client.rules.slices import Slice, parse_slices

LINEAR = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
ATTENTION = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")


def target(module: str, layer: int | None) -> Target:
    attention = module.endswith("attn")
    tensors = ATTENTION if attention else LINEAR
    return Target(
        module,
        layer,
        "FA" if attention else "linear",
        tensors,
        frozenset(tensors[:5] if attention else tensors[:4]),
    )


NOTHING = "rule '1' matches nothing: "
MODEL = [
    *(target(f"layers.{n}.{part}", n) for n in range(4) for part in ("qkv", "attn", "mlp.up", "mlp.down")),
    target("lm_head", None),
]  # fmt: skip


def rules_of(*documents: dict[str, Any], steps: str = "0", **defaults: Any) -> list[Rule]:
    return [Rule(settings, When(Ranges(steps)), **defaults) for settings in parse_rules(documents)]


def resolved(*documents: dict[str, Any], **defaults: Any) -> Resolved:
    return resolve(rules_of(*documents, **defaults), MODEL)


def captured(plan: Resolved) -> dict[str, list[str]]:
    return {t.module: list(wanted) for t, wanted in zip(plan.targets, plan.wanted, strict=True) if wanted}


def test_a_rule_without_anything_captures_what_no_rules_capture() -> None:
    plan = resolved({})

    assert captured(plan) == {t.module: [name for name in t.tensors if name in t.default] for t in MODEL}
    assert {wanted.of(1) for found in plan.wanted for wanted in found.values()} == {Kept(None, "full")}
    assert {wanted.of(0) for found in plan.wanted for wanted in found.values()} == {None}


@pytest.mark.parametrize(
    ("document", "modules"),
    [
        ({"include": r"mlp\.(up|gate)", "layers": "1,3"}, ["layers.1.mlp.up", "layers.3.mlp.up"]),
        ({"include": ["up$", "lm_"], "exclude": [r"\.[0-2]\."]}, ["layers.3.mlp.up", "lm_head"]),
        ({"components": "FA", "layers": 2}, ["layers.2.attn"]),
        ({"layers": "all", "exclude": "mlp|qkv"}, [f"layers.{n}.attn" for n in range(4)]),
        ({"components": ["linear"], "exclude": "layers"}, ["lm_head"]),
        ({"tensors": "query", "layers": "3-"}, ["layers.3.attn"]),
    ],
)
def test_filters_are_all_to_be_passed(document: dict[str, Any], modules: list[str]) -> None:
    assert list(captured(resolved(document))) == modules


def test_globs_match_whole_names() -> None:
    plan = resolve([Rule(rule_of_globs(["*.mlp.u?", "head"]), When(Ranges("0")))], MODEL)

    assert list(captured(plan)) == [f"layers.{n}.mlp.up" for n in range(4)]


def test_tensors_and_operations() -> None:
    plan = resolved({"include": "qkv|attn", "layers": 0, "tensors": ["grad_query", "grad_weight", "output"]})
    backward = resolved({"include": "qkv|attn", "layers": 0, "operations": "backward"})

    assert captured(plan) == {
        "layers.0.qkv": ["output", "grad_weight"],
        "layers.0.attn": ["output", "grad_query"],
    }
    assert captured(backward) == {"layers.0.qkv": ["grad_output"], "layers.0.attn": ["grad_output"]}


def test_what_watch_was_given_holds_for_rules_that_say_nothing_else() -> None:
    defaults = {"tensors": frozenset({"weight"}), "slices": parse_slices("first:2"), "store": "stats"}
    plan = resolved(
        {"include": "up", "layers": 0}, {"include": "down", "layers": 0, "tensors": "input"}, **defaults
    )

    assert captured(plan) == {"layers.0.mlp.up": ["weight"], "layers.0.mlp.down": ["input"]}
    kept = plan.wanted[MODEL.index(target("layers.0.mlp.down", 0))]["input"].of(0b10)
    assert kept is not None
    assert (kept.take and kept.take.text, kept.store) == ("first:2", "stats")


def test_of_several_open_rules_the_first_one_cuts_and_all_that_any_keeps_is_kept() -> None:
    plan = resolved(
        {"include": "up", "store": "stats", "slices": "first:1"},
        {"layers": 0, "tensors": "input"},
        {"include": "up", "store": "both", "steps": "7"},
    )
    wanted = plan.wanted[MODEL.index(target("layers.0.mlp.up", 0))]

    def kept(tensor: str, open_rules: int) -> tuple[str | None, str] | None:
        found = wanted[tensor].of(open_rules)
        return found and (found.take and found.take.text, found.store)

    assert (wanted["input"].mask, wanted["output"].mask) == (0b111, 0b101)
    assert [kept("input", mask) for mask in (0b001, 0b010, 0b011, 0b100, 0b110)] == [
        ("first:1", "stats"), (None, "full"), ("first:1", "both"), (None, "both"), (None, "both"),
    ]  # fmt: skip
    assert [kept("output", mask) for mask in (0b001, 0b010)] == [("first:1", "stats"), None]


NUMBERS = st.integers(0, 12)
PARTS = st.one_of(
    NUMBERS.map(str),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: f"{pair[0]}-{sum(pair)}"),
    st.tuples(NUMBERS, st.integers(1, 6)).map(lambda pair: f"{pair[0]}-:{pair[1]}"),
    st.tuples(NUMBERS, NUMBERS, st.integers(1, 6)).map(
        lambda three: f"{three[0]}-{three[0] + three[1]}:{three[2]}"
    ),
)
TEXTS = st.lists(PARTS, min_size=1, max_size=3).map(",".join)


@given(TEXTS, TEXTS)
def test_ranges_meet_where_a_number_is_in_both(one: str, two: str) -> None:
    first, second = Ranges(one), Ranges(two)

    shared = any(number in first and number in second for number in range(200))

    assert first.meets(second) == second.meets(first) == shared


@pytest.mark.parametrize(
    ("text", "beyond"),
    [
        ("0-3", None),
        ("0-4", 4),
        ("4-", 4),
        ("0-", None),
        ("all", None),
        ("1,9", 9),
        ("0-90:3", 90),
        ("0-:2", None),
    ],
)
def test_numbers_that_are_not_there(text: str, beyond: int | None) -> None:
    assert Ranges(text).beyond(4) == beyond


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"include": "mpl"},
            NOTHING + "no module's name fits (layers.0.qkv, layers.0.attn, layers.0.mlp.up, ...)",
        ),
        ({"include": "lm_head", "exclude": "head"}, NOTHING + "exclude leaves out lm_head"),
        (
            {"components": "fa"},
            NOTHING + "components fa, and its modules are of FA, linear; did you mean FA?",
        ),
        ({"include": "up", "layers": "4-"}, NOTHING + 'layers "4-", and its modules are in layers 0-3'),
        ({"include": "lm_head", "layers": 0}, NOTHING + 'layers "0", and its modules are in no layer'),
        (
            {"components": "linear", "tensors": "query"},
            "rule '1': none of its 13 modules has query; they have " + ", ".join(LINEAR),
        ),
        (
            {"components": "linear", "tensors": ["input", "query", "key"]},
            "\n".join(
                f"rule '1': none of its 13 modules has {x}; they have {', '.join(LINEAR)}"
                for x in ("query", "key")
            ),
        ),
        (
            {"components": "FA", "slices": {"query": "first:1", "input": "first:1"}},
            "rule '1': slices of input, which it does not capture",
        ),
        (
            {"tensors": "input", "slices": {"output": "first:1"}},
            "rule '1': slices of output, which it does not capture",
        ),
        ({"layers": "2-7"}, "rule '1': layers \"2-7\" name layer 7; its modules are in layers 0-3"),
    ],
)
def test_what_comes_to_nothing_is_said_once_with_what_there_is(document: dict[str, Any], said: str) -> None:
    assert "\n".join(problem.text for problem in problems_of(resolved(document), whole=True)) == said


def test_a_stage_of_a_pipeline_may_lack_what_a_rule_names() -> None:
    documents = [
        {"layers": "4-"},
        {"layers": "0-7"},
        {"include": "embedding"},
        {"layers": 0, "tensors": ["query", "output"]},
    ]

    assert problems_of(resolved(*documents), whole=False) == []
    assert len(problems_of(resolved(*documents), whole=True)) == 3


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ({"slices": "first:1"}, {"include": "up"}, ["as first:1 and as whole; 'a' wins"]),
        ({"slices": "first:1"}, {"slices": "first:2", "tensors": "weight"}, []),
        ({"slices": "first:1", "steps": "0-:4"}, {"steps": "2-:4"}, []),
        ({"slices": "first:1", "steps": "0-:4"}, {"steps": "2-:3"}, ["as first:1 and as whole"]),
        ({"slices": "first:1", "ranks": 0}, {"ranks": "1-"}, []),
        ({"slices": "first:1", "micro_batches": 0}, {"micro_batches": 1}, []),
        ({"slices": "first:1", "micro_batches": 0}, {}, ["as first:1 and as whole"]),
        ({"slices": "first:1", "include": "up"}, {"include": "down"}, []),
        ({"store": "stats"}, {"store": "full"}, ["as stats and as full; both are kept"]),
        ({"store": "stats", "steps": "all"}, {"store": "full", "steps": "0-:100"}, []),
        ({"store": "stats"}, {}, []),
        ({"store": "both"}, {"store": "full"}, []),
    ],
)
def test_rules_contradict_each_other_only_at_the_same_moments(
    one: dict[str, Any], two: dict[str, Any], said: list[str]
) -> None:
    problems = problems_of(resolved({"name": "a", **one}, {"name": "b", **two}), whole=True)
    found = [problem.text for problem in problems]

    assert len(found) == len(said)
    assert all(part in problem for part, problem in zip(said, found, strict=True))
    assert all(
        problem.startswith("rules 'a' and 'b' contradict each other: both capture ") for problem in found
    )


def test_ranks_that_the_job_does_not_have_are_said_once() -> None:
    when = When(Ranges("0"), ranks=Ranges("0-8"))
    rules = [Rule(settings, when) for settings in parse_rules([{}, {"ranks": "0,2"}, {"ranks": "0-"}, {}])]

    assert rank_problems(rules, 2) == [
        'ranks "0-8" name rank 8; this job has ranks 0-1',
        "rule '2': ranks \"0,2\" name rank 2; this job has ranks 0-1",
    ]
    assert rank_problems(rules, 9) == []
    assert rank_problems(rules[1:2], 1) == ["rule '2': ranks \"0,2\" name rank 2; this job has rank 0 alone"]


def test_the_plan_is_a_table() -> None:
    plan = resolved(
        {"name": "attention", "components": "FA", "steps": "0-2,100-:100", "slices": {"query": "tokens:0-7"}},
        {"name": "up", "include": "up", "layers": "0,2-3", "operations": "backward", "store": "stats"},
        {"name": "head", "include": "head", "tensors": "weight", "micro_batches": 0, "ranks": "0-1"},
        {"name": "none", "include": "nothing"},
    )

    query = "query (tokens:0-7), key, value, output, grad_output"
    assert [cells(line) for line in plan_lines(plan)] == [
        ["rule", "modules", "tensors", "steps", "keeps"],
        ["attention", "4 FA in layers 0-3", query, "0-2,100-:100", "full"],
        ["up", "3 linear in layers 0, 2-3", "grad_output", "0", "stats"],
        ["head", "1 linear", "weight", "0, micro-batches 0, ranks 0-1", "full"],
        ["none", "none", "-", "0", "full"],
    ]  # fmt: skip


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_slice_is_taken_by_its_tensor_alone() -> None:
    plan = resolved({"slices": {"input": "first:1"}, "tensors": ["input", "output"], "include": "up"})
    wanted = plan.wanted[2]

    found = {name: kept.take for name in wanted if (kept := wanted[name].of(1)) is not None}

    assert isinstance(found["input"], Slice)
    assert found["output"] is None
