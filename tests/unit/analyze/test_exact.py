"""Sums without rounding: against fractions, over any terms, counts, groupings and orders."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capd.analyze.exact import exact, quotient, rounded, weighted

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)
UNIT = Fraction(1, 1 << (1074 + 53))


@given(FLOATS)
def test_every_finite_float64_is_a_whole_number_of_units(value: float) -> None:
    assert exact(value) * UNIT == Fraction(value)
    assert rounded(exact(value)) == value


@given(st.lists(st.tuples(FLOATS, st.integers(0, 1 << 40)), max_size=30))
def test_weighted_sums_are_those_of_fractions_for_few_and_for_very_many(
    pairs: list[tuple[float, int]],
) -> None:
    values = np.array([value for value, _ in pairs], np.float64)
    counts = np.array([count for _, count in pairs], np.int64)
    small = counts & 0xFFFF

    assert weighted(values, counts) * UNIT == sum(Fraction(value) * count for value, count in pairs)
    expected = sum(Fraction(value) * int(count) for value, count in zip(values.tolist(), small, strict=True))
    assert weighted(values, small) * UNIT == expected


@given(st.lists(FLOATS, max_size=30), st.randoms(use_true_random=False))
def test_a_sum_is_the_same_in_any_order_and_as_fsum_rounds_it(values: list[float], random: object) -> None:
    total = sum(map(exact, values))
    random.shuffle(values)  # type: ignore[attr-defined]

    assert sum(map(exact, values)) == total
    try:
        assert rounded(total) == math.fsum(values)
    except OverflowError:
        assert abs(total) * UNIT > Fraction(1.7e308)


def test_quotients_round_once_and_know_their_ends() -> None:
    assert quotient(exact(1.0), exact(3.0)) == 1 / 3
    assert quotient(1, 0) is None
    assert quotient(exact(1e308) * exact(1e308), 1) == math.inf
    assert quotient(-exact(1e308) * exact(1e308), 1) == -math.inf
