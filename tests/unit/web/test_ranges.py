"""The shares of values outside of a format's range, from exponent histograms: against the elements themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from capd.analyze.distribution import distribution_of
from capd.analyze.grids import grids, overflow_of
from capd.rules.ranges import FORMAT_RANGES
from capd.store.format.statistics import public, summarise
from capd.web.reading.ranges import outside


@given(bits=arrays(np.uint16, st.integers(1, 200)), label=st.sampled_from(sorted(FORMAT_RANGES)))
def test_the_bounds_hold_the_count_of_the_elements(bits: np.ndarray, label: str) -> None:
    counted = overflow_of(distribution_of(bits, "bfloat16"), grids()[label])
    found = outside(public(summarise(bits, "bfloat16")), FORMAT_RANGES[label])
    for name in ("above", "below", "flushed"):
        low, high = getattr(found, name)
        assert low <= getattr(counted, name) <= high, name
    if label != "bf16":
        assert found.below[0] == found.below[1] == counted.below
        assert found.flushed[0] == found.flushed[1] == counted.flushed


def test_a_largest_value_within_the_format_is_known_to_be_there() -> None:
    values = np.array([448.0, 300.0, 2.0], np.float32)
    assert outside(public(summarise(values, "float32")), FORMAT_RANGES["e4m3"]).above == (0, 0)
    values[0] = 449.0
    assert outside(public(summarise(values, "float32")), FORMAT_RANGES["e4m3"]).above == (1, 2)
