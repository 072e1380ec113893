"""The distribution of SQNRs over tensors: what nine of ten reach, the median, and how exactly a sample knows it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from capd.analyze.verdict.levels import Levels, levels_of


def of(values: Sequence[float], errors: Sequence[float | None] = ()) -> Levels:
    found = levels_of(values, errors)
    assert found is not None
    return found


def test_a_loud_tensor_says_nothing_of_nine_quiet_ones() -> None:
    found = of([31.5, *[0.0] * 9])

    assert (found.tenth_db, found.median_db, found.poor) == (0.0, 0.0, 9)


@pytest.mark.parametrize("number", [1, 9, 10, 11, 40])
def test_at_least_nine_of_ten_tensors_and_at_least_half_reach_what_is_said(number: int) -> None:
    values = [float(value) for value in range(number)]

    found = of(values[::-1])

    assert sum(value >= found.tenth_db for value in values) >= 0.9 * number
    assert sum(value >= found.median_db for value in values) >= 0.5 * number


def test_what_was_read_whole_has_no_error_and_a_sample_has_one() -> None:
    values = [30.0 + place % 7 for place in range(50)]

    assert levels_of([]) is None
    whole, sample, alone = (of(values, errors) for errors in ([0.0] * 50, [None] * 50, [0.5] * 50))
    single = of([30.0], [None])

    error = sample.error_db
    assert error is not None
    assert (whole.error_db, single.error_db) == (0, None)
    assert alone.error_db == pytest.approx(math.hypot(error, 0.5))
    assert of([30.0], [0.2]).error_db == pytest.approx(0.2)
