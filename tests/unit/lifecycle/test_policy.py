"""What a retention policy keeps, and why: pure rules on tables of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.lifecycle.policy import Candidate, Policy, age_text, parse_age, plan

DAY = 86_400.0
NOW = 1000 * DAY


def run(
    name: str, age_days: float, nbytes: int = 10, tags: tuple[str, ...] = (), held: str = ""
) -> Candidate:
    return Candidate(name, NOW - age_days * DAY, nbytes, tags, held)


RUNS = [run("a", 40), run("b", 20, tags=("paper",)), run("c", 10), run("d", 3), run("e", 1)]


def kept(policy: Policy, runs: list[Candidate] = RUNS, **options: bool) -> str:
    return "".join(one.run.name for one in plan(runs, policy, NOW, **options) if one.keep)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Policy(keep_last=2), "de"),
        (Policy(keep_last=9), "abcde"),
        (Policy(keep_within_s=15 * DAY), "cde"),
        (Policy(keep_tags=("paper",)), "b"),
        (Policy(keep_last=1, keep_tags=("paper", "none")), "be"),
        (Policy(max_nbytes=30), "cde"),
        (Policy(max_nbytes=50), "abcde"),
        (Policy(keep_within_s=15 * DAY, max_nbytes=20), "de"),
        (Policy(keep_last=3, max_nbytes=20), "cde"),
        (Policy(keep_tags=("paper",), keep_within_s=30 * DAY, max_nbytes=20), "be"),
        (Policy(max_nbytes=0), ""),
    ],
)
def test_a_run_stays_if_any_rule_keeps_it_and_the_size_takes_the_oldest(policy: Policy, names: str) -> None:
    assert kept(policy) == names


def test_live_and_pinned_runs_stay_whatever_the_rules_say() -> None:
    runs = [run("a", 90, held="live"), run("b", 80, held="pinned"), run("c", 70)]

    assert kept(Policy(keep_within_s=DAY), runs) == "ab"
    assert kept(Policy(max_nbytes=0), runs) == "ab"
    assert [one.reason for one in plan(runs, Policy(keep_within_s=DAY), NOW)][:2] == ["live", "pinned"]


def test_the_newest_run_stays_if_asked_for() -> None:
    assert kept(Policy(keep_within_s=1.0), is_unattended=True) == "e"
    assert kept(Policy(max_nbytes=0), is_unattended=True) == "e"
    assert kept(Policy(keep_within_s=1.0)) == ""


def test_a_plan_that_nobody_looks_at_leaves_runs_that_their_jobs_may_continue() -> None:
    runs = [run("a", 90), run("b", 30 / 1440), run("c", 2), run("d", 1)]

    assert kept(Policy(keep_last=1), runs, is_unattended=True) == "bd"
    assert kept(Policy(max_nbytes=0), runs, is_unattended=True) == "bd"
    assert kept(Policy(keep_last=1), runs) == "d"


def test_what_is_not_counted_takes_no_place_among_the_last() -> None:
    foreign = replace(run("x", 0, held="cannot be read"), is_counted=False)
    runs = [run("a", 9), run("b", 5), replace(run("c", 4), is_counted=False), run("d", 1), foreign]

    assert kept(Policy(keep_last=1), runs) == "dx"
    assert kept(Policy(keep_last=2), runs) == "bcdx"
    assert kept(Policy(max_nbytes=0), runs, is_unattended=True) == "dx"


def test_each_decision_has_its_reason() -> None:
    found = plan(RUNS, Policy(keep_last=1, keep_within_s=15 * DAY, max_nbytes=25, keep_tags=("paper",)), NOW)

    assert [one.reason for one in found] == [
        "40 d old, no rule keeps it", "tag paper", "over the size limit", "over the size limit", "one of the last 1",
    ]  # fmt: skip


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50), st.booleans()), max_size=12),
    st.integers(1, 5) | st.none(),
    st.floats(0, 100) | st.none(),
    st.integers(0, 200) | st.none(),
)
def test_rules_never_remove_what_is_held_or_among_the_last(
    rows: list[tuple[float, int, bool]], last: int | None, days: float | None, size: int | None
) -> None:
    rows.sort(reverse=True)
    runs = [run(str(n), age, nbytes, held="live" * live) for n, (age, nbytes, live) in enumerate(rows)]
    policy = Policy(last, None if days is None else days * DAY, size)
    found = plan(runs, policy, NOW)

    assert [one.run for one in found] == runs
    assert all(one.keep for one in found if one.run.held)
    assert all(one.keep for one in found[len(found) - (last or 0) :])
    if not policy:
        assert all(one.keep for one in found)
    if size is not None:
        free = [one.run.nbytes for one in found if one.keep and not one.is_fixed]
        assert not free or sum(one.run.nbytes for one in found if one.keep) <= size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 30 * DAY), ("12h", 43_200), ("2w", 14 * DAY), ("1.5 m", 90), ("9s", 9)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1y", "1e9d", "99999999w", None, 30])
def test_what_is_no_age_says_what_is_accepted(text: object) -> None:
    with pytest.raises(ValueError, match="is not an age; write"):
        parse_age(text)


def test_ages_are_shown_in_their_largest_unit() -> None:
    assert [age_text(s) for s in (5, 90, 7200, 40 * DAY)] == ["5 s", "2 min", "2 h", "40 d"]
