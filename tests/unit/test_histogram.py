"""Durations are counted once each, in the bucket of their bound."""

from __future__ import annotations

import pytest

from capd.histogram import BOUNDS_S, Histogram


def test_a_duration_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram()
    for bound in BOUNDS_S:
        histogram.add(bound)
        histogram.add(bound * 1.01)

    counts, total_s = histogram.read()
    assert counts == [1, *[2] * (len(BOUNDS_S) - 1), 1]
    assert total_s == pytest.approx(2.01 * sum(BOUNDS_S))


def test_what_is_read_does_not_change_later() -> None:
    histogram = Histogram()
    counts, _ = histogram.read()
    histogram.add(0.0)

    assert sum(counts) == 0
    assert sum(histogram.read()[0]) == 1
