"""Distributions of stored bits against numpy on the same values: exact where promised, else within the bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from capd.analyze.distribution import Distribution, distribution_of
from capd.store.format.dtypes import stored_type, to_values
from capd_client.protocol.dtypes import ITEM_NBYTES

SHARES = (0.0, 0.001, 0.25, 0.5, 0.77, 0.999, 1.0)
EXACT = [name for name, nbytes in ITEM_NBYTES.items() if nbytes == 1 or name in ("bfloat16", "float16")]
BOUND, TINY = 2.0**-8, 2.0**-134


def some_bits(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Any bit pattern; of bool the two that there are."""
    stored = stored_type(dtype).stored
    if dtype == "bool":
        return np.random.default_rng(seed).integers(0, 2, count).astype(bool)
    data = np.random.default_rng(seed).integers(0, 256, count * stored.itemsize, dtype=np.uint8)
    return data.view(stored)


def finite_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        values = to_values(bits, dtype).astype(np.float64).ravel()
    return values[np.isfinite(values)]


@pytest.mark.parametrize("dtype", EXACT)
def test_quantiles_of_8_and_16_bit_types_are_those_of_numpy(dtype: str) -> None:
    bits = some_bits(dtype, 300_001)

    found = distribution_of(bits, dtype)

    assert found.exact
    expected = np.quantile(finite_of(bits, dtype), SHARES)
    np.testing.assert_allclose(found.quantiles(SHARES), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_coarse_distribution_moves_no_value_by_more_than_a_32nd(dtype: str) -> None:
    bits = some_bits(dtype, 100_000, seed=2)
    fine = distribution_of(np.concatenate([bits, np.zeros(9, bits.dtype)]), dtype)

    found = fine.coarse()

    values, counts = found.finite()
    assert not found.exact
    assert found.specials() == fine.specials()
    assert counts.sum() == fine.finite()[1].sum()
    assert counts[values == 0].sum() >= 9
    assert values.size <= 2 * 256 * 16 + 1
    expected = np.array(fine.quantiles(SHARES))
    np.testing.assert_allclose(
        found.quantiles(SHARES), expected, rtol=1 / 32, atol=2.0**-19 if dtype == "float16" else 2.0**-131
    )


def test_a_coarse_distribution_of_nothing_is_nothing() -> None:
    assert Distribution().coarse().quantiles(SHARES) is None
    assert distribution_of(np.empty(0, np.uint16), "bfloat16").coarse().quantiles(SHARES) is None


@pytest.mark.parametrize("dtype", EXACT)
def test_every_value_is_counted_as_often_as_it_occurs(dtype: str) -> None:
    bits = some_bits(dtype, 70_000, seed=1)

    values, counts = distribution_of(bits, dtype).finite()

    expected_values, expected_counts = np.unique(finite_of(bits, dtype), return_counts=True)
    together = dict.fromkeys(expected_values, 0)
    for value, count in zip(values, counts, strict=True):
        together[value] += int(count)  # -0 and 0 are two patterns of one value
    assert list(together.values()) == expected_counts.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint16", "int32", "int64"])
def test_quantiles_of_wider_types_are_within_the_bound(dtype: str) -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=50_000) * np.exp2(rng.integers(-30, 14, 50_000))
    bits = np.abs(values).astype(dtype) if dtype.startswith("u") else values.astype(dtype)

    found = distribution_of(bits, dtype)

    expected = np.quantile(bits.astype(np.float64), SHARES)
    assert found.exact == (dtype[0] in "iu" and np.abs(bits.astype(float)).max() <= 256)
    assert np.all(np.abs(np.array(found.quantiles(SHARES)) - expected) <= BOUND * np.abs(expected) + TINY)


@given(arrays.arrays(np.float32, st.integers(1, 60), elements=st.floats(width=32)), st.floats(0, 1))
def test_any_float32_is_within_the_bound_and_bfloat16_values_among_them_are_exact(
    values: np.ndarray, share: float
) -> None:
    finite = values[np.isfinite(values)].astype(np.float64)
    found = distribution_of(values, "float32")
    if not finite.size:
        assert found.quantiles([share]) is None
        return
    # Neighbours that are interpolated between may have either sign, so the bound is of the larger one.
    [quantile], near = found.quantiles([share]), np.sort(finite)
    place = share * (finite.size - 1)
    largest = max(abs(near[int(np.floor(place))]), abs(near[min(finite.size - 1, int(np.floor(place)) + 1)]))
    slack = 1e-12 * largest
    assert abs(quantile - np.quantile(finite, share)) <= BOUND * largest + TINY + slack

    short = torch.from_numpy(values).bfloat16()
    same = distribution_of(short.float().numpy(), "float32")
    assert same.exact
    exact = distribution_of(short.view(torch.uint16).numpy(), "bfloat16")
    assert same.quantiles([0.0, share, 1.0]) == exact.quantiles([0.0, share, 1.0])


def test_rounding_goes_to_the_nearest_with_ties_to_even_and_never_to_inf() -> None:
    largest = np.finfo(np.float32).max
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -largest, np.inf, np.nan, 1e-45], np.float32)

    found, _ = distribution_of(values, "float32").finite()

    by_torch = torch.from_numpy(values[[0, 1, 5]]).bfloat16().double().tolist()
    biggest = float(torch.finfo(torch.bfloat16).max)
    assert sorted(found) == sorted([*by_torch, -biggest])
    beyond, _ = distribution_of(np.array([1e300, -1e300]), "float64").finite()
    assert beyond.tolist() == [-biggest, biggest]


@given(
    st.lists(
        st.tuples(st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float32"]), st.integers(0, 400)),
        max_size=6,
    )
)
def test_parts_of_several_types_merge_to_the_whole(parts: list[tuple[str, int]]) -> None:
    whole, values = Distribution(), [np.empty(0)]
    for seed, (dtype, count) in enumerate(parts):
        bits = some_bits(dtype, count, seed)
        if dtype == "float32":
            bits = np.round(np.random.default_rng(seed).normal(size=count)).astype(np.float32)
        whole.add(distribution_of(bits, dtype))
        values.append(finite_of(bits, dtype))
    everything = np.concatenate(values)

    found = whole.quantiles(SHARES)

    assert whole.exact
    if everything.size:
        np.testing.assert_allclose(found, np.quantile(everything, SHARES), rtol=1e-12)
    else:
        assert found is None


def test_many_additions_are_counted_exactly_and_take_bounded_memory() -> None:
    whole = Distribution()
    for seed in range(50):
        whole.add(distribution_of(some_bits("bfloat16", 30_000, seed), "bfloat16"))

    assert sum(part.size for parts in whole._parts.values() for part, _ in parts) <= 3 << 16
    everything = np.concatenate(
        [finite_of(some_bits("bfloat16", 30_000, seed), "bfloat16") for seed in range(50)]
    )
    np.testing.assert_allclose(whole.quantiles(SHARES), np.quantile(everything, SHARES), rtol=1e-12)


def test_64_bit_integers_beyond_what_floats_hold_are_not_called_exact() -> None:
    assert not distribution_of(np.array([2**53 + 1]), "int64").exact
    assert distribution_of(np.array([2**20, -3]), "int64").exact


def test_empty_and_scalar_records_have_a_distribution() -> None:
    assert distribution_of(np.empty((3, 0), np.float32), "float32").quantiles(SHARES) is None
    assert distribution_of(np.float32(2.5).reshape(()), "float32").quantiles([0.5]) == [2.5]
    assert distribution_of(np.uint8(0x2B).reshape(()), "float4_e2m1fn_x2").finite()[1].tolist() == [1, 1]
