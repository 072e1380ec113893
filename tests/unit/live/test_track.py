"""Rates and sparklines of the last minute."""

from __future__ import annotations

import pytest

from capd.live.track import HISTORY_S, Track


def counted(values: list[tuple[float, float]]) -> Track:
    track = Track()
    for now, value in values:
        track.count(now, value)
    return track


def test_a_rate_needs_two_values_and_covers_the_last_seconds() -> None:
    assert counted([(0, 5)]).rate() is None
    assert counted([(0, 0), (1, 10)]).rate() == 10
    # The first ten seconds are too long ago.
    assert counted([(0, 0), (10, 1000), (15, 1005)]).rate(5) == 1
    assert counted([(float(s), 7.0 * s) for s in range(30)]).rate() == 7


def test_a_track_is_bounded_in_time_and_number() -> None:
    track = counted([(s / 100, s) for s in range(50_000)])

    assert HISTORY_S - 1 < track.covered_s() < HISTORY_S + 1
    assert len(track._points) < 140
    assert track.rate() == pytest.approx(100)


def test_a_counter_that_goes_down_began_again() -> None:
    track = counted([(0, 500), (1, 600), (2, 3), (3, 13)])

    assert track.rate() == 10
    assert track.covered_s() == 1


def test_a_sparkline_has_gaps_where_nothing_is_known() -> None:
    # One a second for ten seconds, silence for twenty, then five a second.
    track = counted(
        [*((float(s), float(s)) for s in range(11)), *((30.0 + s, 10 + 5.0 * s) for s in range(11))]
    )
    rates = track.rates(40.0, 60)

    # The minute begins at -20.
    assert rates[:20] == [None] * 20
    assert rates[20:30] == [1] * 10
    assert rates[30:50] == [None] * 20
    assert rates[50:] == [5] * 10
    assert track.rates(40.0, 6) == [None, None, 1, None, None, 5]
