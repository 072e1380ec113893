"""Windows with a clock: when an iteration is past, which ranges are kept, and what is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.server.recorder.kept_ranges import KeptRange, KeptRanges
from capd.server.recorder.window import SETTLE_S, AttemptWindow, HeldIteration
from tests.unit.server.recorder.desk import DEFINE, Desk

K = 3
CLIENT = b"c" * 16


def window(*iterations: int, begun: int | None = None) -> AttemptWindow:
    """A window whose iteration i came at the time i."""
    made = AttemptWindow(begun=begun)
    for number in iterations:
        made.iterations[number] = held = HeldIteration(0, number)
        held.add(CLIENT, number + 1, DEFINE, 8, float(number))
    return made


def past(made: AttemptWindow, now: float) -> list[int]:
    return [held.iteration for held in made.past(now, K)]


@pytest.mark.parametrize(
    ("begun", "now", "expected"),
    [
        (None, 1000.0, []),
        (2, 1000.0, []),
        (3, 2.0 + SETTLE_S - 0.1, []),
        (3, 2.0 + SETTLE_S, [0]),
        (5, 3.0 + SETTLE_S, [0, 1]),
        (100, 1000.0, [0, 1, 2, 3, 4]),
    ],
)
def test_an_iteration_is_past_some_time_after_the_last_one_of_its_window(
    begun: int | None, now: float, expected: list[int]
) -> None:
    assert past(window(0, 1, 2, 3, 4, begun=begun), now) == expected


def test_the_window_is_as_far_as_its_slowest_rank(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for iteration in range(9):
        desk.put(iteration, 0)
        desk.put(min(iteration, 4), 1)
    desk.look(4)
    desk.turn()
    assert desk.held == list(range(2, 9))


def test_what_leaves_or_is_written_is_never_past() -> None:
    made = window(0, 1, 2, begun=100)
    made.iterations[0].leaves = True
    made.iterations[1].writing = 1
    assert past(made, 1000.0) == [2]


def test_an_iteration_that_is_done_takes_no_later_one_of_its_number_away() -> None:
    made = window(3)
    done = made.iterations[3]
    made.claim(done)
    made.iterations[3] = later = HeldIteration(0, 3)
    made.claim(done)
    assert made.iterations == {3: later}


def test_when_all_ranks_have_left_the_rest_is_past_after_a_while() -> None:
    made = window(5, 6)
    made.look(6, 10.0, is_open=True)
    made.look(None, 20.0, is_open=False)
    made.look(None, 21.0, is_open=False)
    assert past(made, 20.0 + SETTLE_S - 0.1) == []
    assert past(made, 20.0 + SETTLE_S) == [5, 6]
    made.look(None, 22.0, is_open=True)
    assert past(made, 100.0) == []


def test_old_attempts_are_forgotten(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for attempt in range(20):
        desk.put(0, attempt=attempt)
        desk.look(0, attempt=attempt)
        desk.turn()
    windows = desk.recorder._runs["run"].windows
    assert len(windows) <= 3
    desk.look(0, attempt=19)
    assert 19 in windows


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12))
def test_kept_ranges_are_the_union_with_the_first_reason_of_each_iteration(
    asked: list[tuple[int, int]],
) -> None:
    ranges, first_reason = KeptRanges(), dict[int, str]()
    for number, (first, size) in enumerate(asked):
        wanted = range(first, first + size + 1)
        is_new = any(one not in first_reason for one in wanted)
        assert ranges.covers(wanted[0], wanted[-1]) is not is_new
        assert ranges.add(KeptRange(wanted[0], wanted[-1], str(number), first)) is is_new
        for one in wanted:
            first_reason.setdefault(one, str(number))
    found = {one: kept.reason for one in range(50) if (kept := ranges.find(one)) is not None}
    assert found == first_reason
