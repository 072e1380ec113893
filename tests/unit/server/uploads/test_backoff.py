"""The pause after failures, with a clock and a chance of the test's own."""

from __future__ import annotations

import pytest

from capd.server.uploads.backoff import Backoff


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pauses(chance: float, count: int) -> list[float]:
    """The pauses after so many failures in a row, to a tenth of a second."""
    clock, found = Time(), []
    backoff = Backoff(clock, lambda: chance)
    for _ in range(count):
        backoff.failed()
        began = clock.now
        while not backoff.is_due:
            clock.now += 0.1
        found.append(round(clock.now - began, 1))
    return found


def test_pauses_double_up_to_five_minutes_and_differ_by_half() -> None:
    assert pauses(1.0, 10) == pytest.approx([2, 4, 8, 16, 32, 64, 128, 256, 300, 300], abs=0.2)
    assert pauses(0.0, 10) == pytest.approx([1, 2, 4, 8, 16, 32, 64, 128, 150, 150], abs=0.2)


def test_a_success_begins_anew_and_a_hopeless_failure_waits_long_at_once() -> None:
    clock = Time()
    backoff = Backoff(clock, lambda: 1.0)
    backoff.failed(slowly=True)
    clock.now = 299.0
    assert not backoff.is_due
    clock.now = 300.0
    assert backoff.is_due
    backoff.succeeded()
    backoff.failed()
    clock.now += 2.0
    assert backoff.is_due
