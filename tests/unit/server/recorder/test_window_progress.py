"""The window of an attempt while its ranks are ahead of the daemon: an iteration waits for those before its end."""

from __future__ import annotations

from capd.server.recorder.window import SETTLE_S, AttemptWindow, HeldIteration

K = 4


def test_an_iteration_waits_for_records_that_are_still_on_their_way() -> None:
    window = AttemptWindow()
    window.iterations[3] = HeldIteration(0, 3, last_at=10.0)
    # The ranks are in iteration 7, but nothing of iteration 6 has come yet.
    window.look(7, 10.1, is_open=True)
    assert window.past(10.1, K) == []
    window.iterations[6] = HeldIteration(0, 6, last_at=11.0)
    assert window.past(10.1 + SETTLE_S, K) == []
    assert window.past(11.0 + SETTLE_S, K) == [window.iterations[3]]


def test_an_iteration_goes_though_nothing_of_the_last_one_is_captured() -> None:
    window = AttemptWindow()
    window.iterations[3] = HeldIteration(0, 3, last_at=10.0)
    window.look(7, 10.1, is_open=True)
    assert window.past(10.1, K) == []
    assert window.past(10.1 + SETTLE_S, K) == [window.iterations[3]]


def test_a_keep_of_iterations_whose_records_are_on_their_way_is_heard() -> None:
    window = AttemptWindow()
    window.iterations[31] = HeldIteration(0, 31)
    window.look(46, 0.0, is_open=True)
    assert window.may_have(37, 44)
    assert not window.may_have(20, 28)
