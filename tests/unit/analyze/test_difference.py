"""Differences of two records, against numpy; and the same to the bit in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.analyze.difference import Difference, difference_of
from capd.store.format.dtypes import stored_type
from capd_client.protocol.dtypes import ITEM_NBYTES

RNG = np.random.default_rng(8)


def test_values_that_differ_are_measured_and_those_that_agree_are_counted() -> None:
    a = RNG.normal(size=(300, 700)).astype(np.float32)
    b = a.copy()
    b[5, :50] += 0.25
    b[7, 0], b[7, 1], b[7, 2] = math.nan, math.inf, 0.0

    found = difference_of(a, b, "float32")

    x, y = a.astype(np.float64), b.astype(np.float64)
    usable = np.isfinite(y)
    x, y = x[usable], y[usable]
    errors = found.errors
    assert (errors.records, errors.count, found.equal) == (1, a.size, (a == b).sum())
    assert (found.identical, found.special, errors.lost, errors.underflows) == (0, 2, 2, 1)
    assert errors.max_abs == np.abs(y - x).max()
    assert found.max_relative == pytest.approx((np.abs(y - x) / np.abs(x)).max())
    assert errors.relative == pytest.approx(np.abs(y - x).sum() / np.abs(x).sum())
    assert errors.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()))
    assert errors.cosine == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


@pytest.mark.parametrize("dtype", ITEM_NBYTES)
def test_any_dtype_agrees_with_itself_and_one_changed_bit_is_seen(dtype: str) -> None:
    stored = stored_type(dtype).stored
    size = 64 * stored.itemsize
    bits = RNG.integers(0, 2 if dtype == "bool" else 256, size, np.uint8).view(stored)
    other = bits.copy()
    other.view(np.uint8)[0] ^= 1

    same, different = difference_of(bits, bits.copy(), dtype), difference_of(bits, other, dtype)

    elements = 128 if dtype == "float4_e2m1fn_x2" else 64
    assert (same.identical, same.equal, same.special, same.errors.max_abs) == (1, elements, 0, 0.0)
    assert (different.identical, different.equal, different.errors.count) == (0, elements - 1, elements)


def test_zeros_of_both_signs_are_equal_values_and_different_bits() -> None:
    found = difference_of(np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32), "float32")

    assert (found.identical, found.equal, found.errors.max_abs) == (0, 1, 0.0)
    assert found.exceeds(0.0)
    assert not found.exceeds(1e-9)


def test_a_tolerance_is_a_share_of_the_largest_value_and_no_nan_is_within_it() -> None:
    a = np.array([100.0, 1.0], np.float32)

    near = difference_of(a, np.array([100.5, 1.0], np.float32), "float32")
    broken = difference_of(a, np.array([100.0, np.nan], np.float32), "float32")

    assert near.exceeds(0.004)
    assert not near.exceeds(0.006)
    assert broken.exceeds(1e9)


def test_empty_records_are_identical() -> None:
    found = difference_of(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), "float32")

    assert (found.identical, found.errors.count, found.exceeds(0.0)) == (1, 0, False)


PAIRS = [difference_of(*RNG.normal(size=(2, 400)).astype(np.float32), "float32") for _ in range(5)]


@given(st.permutations(range(5)))
def test_pairs_add_up_to_the_same_bits_in_any_order(order: list[int]) -> None:
    there, back = Difference(), Difference()
    for at in range(5):
        there.add(PAIRS[at])
        back.add(PAIRS[order[at]])

    assert there == back
    assert there.errors.records == 5
