"""Short sums: exact, the same in any order and grouping, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from capd.analyze.exact import ShortSum

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def summed(values: list[float]) -> ShortSum:
    found = ShortSum()
    for value in values:
        found.add(value)
    return found


@given(st.lists(FINITE), st.lists(FINITE), st.randoms())
def test_a_sum_is_exact_and_the_same_in_any_order_and_grouping(
    a: list[float], b: list[float], rng: Random
) -> None:
    both = [*a, *b]
    whole = sum(map(Fraction, both), Fraction())
    found = summed(both)
    rng.shuffle(both)
    parts = summed(b)
    parts.extend(summed(a))

    assert found == summed(both) == parts
    assert Fraction(found.mantissa) * Fraction(2) ** found.exponent == whole
    try:
        assert found.value == float(whole)
    except OverflowError:
        assert found.value == (math.inf if whole > 0 else -math.inf)


def test_terms_that_are_not_finite_are_added_as_such() -> None:
    assert summed([1.0, math.inf]).value == math.inf
    assert math.isnan(summed([math.inf, -math.inf, 1.0]).value)
