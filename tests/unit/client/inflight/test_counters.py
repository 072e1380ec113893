"""A framework's own counters in the place of counted forwards and steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Optional
from weakref import WeakSet

import pytest

from capd_client.process.log import RateLimitedLog
from capd_client.steps import clock as clocks
from capd_client.steps.clock import Clock, begin_counted, clock_of, counting, end_counted
from capd_client.steps.context import Context

Where = tuple[Optional[int], Optional[int]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    monkeypatch.setattr(clocks, "_clocks", WeakSet())
    monkeypatch.setattr(clocks, "_notices", RateLimitedLog())
    yield clock_of(Context(environ={}))
    assert not clocks._counters


def forwards(clock: Clock, count: int = 1) -> list[tuple[int, int]]:
    """Where the forwards of a root lie."""
    seen = []
    for _ in range(count):
        clock.begin_forward("root")
        seen.append((clock.context.iteration, clock.context.micro_batch))
    return seen


def test_what_a_framework_says_holds_however_often_the_root_runs(clock: Clock) -> None:
    begun: list[int] = []
    clock = clock_of(Context(environ={}, on_iteration=begun.append))
    seen = []
    for iteration in (1000, 1001):
        for micro_batch in range(2):
            with counting(lambda at=(iteration, micro_batch): at):
                seen += forwards(clock, 3)
        clock._optimizer_stepped()

    assert seen == [(i, m) for i in (1000, 1001) for m in (0, 1) for _ in range(3)]
    assert begun == [1000, 1001]


def test_micro_batches_may_come_in_any_order(clock: Clock) -> None:
    """As the chunks of an interleaved pipeline do."""
    seen = []
    for micro_batch in (0, 1, 0, 1, 2):
        with counting(lambda at=(7, micro_batch): at):
            seen += forwards(clock)

    assert seen == [(7, m) for m in (0, 1, 0, 1, 2)]


def test_the_count_goes_on_where_a_framework_ended(clock: Clock) -> None:
    with counting(lambda: (1000, 3)):
        forwards(clock)
        clock._optimizer_stepped()

    seen = forwards(clock, 2)
    clock._optimizer_stepped()

    assert seen + forwards(clock) == [(1001, 0), (1001, 1), (1002, 0)]


def test_a_framework_is_asked_again_behind_a_step_inside_its_micro_batch(clock: Clock) -> None:
    steps = [4]
    with counting(lambda: (steps[0], 0)):
        seen = forwards(clock)
        clock._optimizer_stepped()
        seen += forwards(clock)  # its own counter moves later than the optimizer
        steps[0] += 1
        seen += forwards(clock)

    assert seen == [(4, 0), (4, 0), (5, 0)]


def test_what_a_framework_does_not_know_is_counted(clock: Clock) -> None:
    seen = []
    for _ in range(2):
        for chunk in (0, 1):
            with counting(lambda at=(None, chunk): at):
                seen += forwards(clock)
        clock._optimizer_stepped()
    for _ in range(2):
        with counting(lambda: (50, None)):
            seen += forwards(clock)

    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (50, 0), (50, 1)]


def test_of_nested_frameworks_the_outer_one_tells_the_iteration_and_the_inner_one_the_micro_batch(
    clock: Clock,
) -> None:
    with counting(lambda: (9, 0)), counting(lambda: (2, None)), counting(lambda: (None, 5)):
        assert forwards(clock) == [(9, 5)]


def test_what_the_job_sets_wins(clock: Clock) -> None:
    context = clock.context
    seen = []
    for own, steps in ((300, (0, 1)), (400, (2,))):  # what it calls an iteration may be several steps
        context.set_moment(iteration=own)  # type: ignore[attr-defined]
        for step in steps:
            for micro_batch in range(2):
                with counting(lambda at=(step, micro_batch): at):
                    seen += forwards(clock)
            clock._optimizer_stepped()
    assert seen == [(300, 0), (300, 1), (300, 2), (300, 3), (400, 0), (400, 1)]

    context.set_moment(iteration=None)  # type: ignore[attr-defined]
    with counting(lambda: (3, 0)):
        assert forwards(clock) == [(3, 0)]
        context.set_moment(micro_batch=8)  # type: ignore[attr-defined]
    with counting(lambda: (3, 1)):
        assert forwards(clock) == [(3, 8)]


def test_a_session_that_begins_inside_a_micro_batch_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_clocks", WeakSet())
    with counting(lambda: (12, 1)):
        assert forwards(clock_of(Context(environ={}))) == [(12, 1)]


def test_a_counter_that_fails_or_returns_nonsense_is_told_once_and_the_count_goes_on(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Where:
        raise AttributeError("global_step")

    with caplog.at_level(logging.WARNING), counting(broken), counting(lambda: (-1, None)):
        assert forwards(clock, 2) == [(0, 0), (0, 1)]
    with caplog.at_level(logging.WARNING), counting(lambda: (-1, 0)):
        assert forwards(clock) == [(0, 2)]
    assert len(caplog.records) == 1
    assert "global_step" in caplog.text


def test_a_begin_may_be_repeated_and_an_end_need_have_no_begin(clock: Clock) -> None:
    at = [2, 0]

    def counter() -> Where:
        return at[0], at[1]

    end_counted(counter)
    begin_counted(counter)
    at[1] = 1
    begin_counted(counter)
    seen = forwards(clock)
    end_counted(counter)

    assert seen + forwards(clock) == [(2, 1), (2, 2)]
