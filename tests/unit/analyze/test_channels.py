"""Channels, blocks and the shape of distributions, against numpy on the same values."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.analyze.block_ranges import RANGE_BLOCKS, BlockRanges, block_ranges
from capd.analyze.channels import MAX_CHANNELS, channels_of
from capd.analyze.distribution import Distribution, distribution_of
from capd.analyze.groups import Tally
from capd.analyze.shape import shape_of

RNG = np.random.default_rng(5)


def bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_each_channel_has_its_largest_magnitude_and_its_outliers(dtype: str) -> None:
    values = (
        torch.from_numpy(RNG.normal(size=(7, 300, 40)).astype(np.float32)).to(torch.bfloat16).double().numpy()
    )
    values[..., 11] *= 64.0
    values[0, 0, :3] = math.nan, math.inf, -math.inf
    bits = bf16(values.astype(np.float32)) if dtype == "bfloat16" else values.astype(dtype)
    finite = np.where(np.isfinite(values), np.abs(values), 0).reshape(-1, 40)
    std = float(values[np.isfinite(values)].std())

    found = channels_of(bits, dtype, std)

    assert found is not None
    assert (found.channels, found.width, found.rows, found.records) == (40, 1, 2100, 1)
    np.testing.assert_array_equal(found.amax, finite.max(0))
    np.testing.assert_array_equal(found.outliers, (finite > 6 * std).sum(0))
    assert found.largest(1) == [(11, finite.max(), found.outliers[11])]
    assert found.outliers[11] > 0 == found.outliers[12]
    assert found.amax_ratio == finite.max() / np.median(finite.max(0))
    assert found.outlier_percent == pytest.approx(100 * (finite > 6 * std).sum() / values.size)


def test_magnitudes_beyond_float32_are_kept() -> None:
    values = RNG.normal(size=(4, 8)) * 1e300

    found = channels_of(values, "float64", None)

    assert found is not None
    np.testing.assert_array_equal(found.amax, np.abs(values).max(0))
    assert found.amax_ratio == np.abs(values).max() / np.median(np.abs(values).max(0))


def test_more_channels_than_the_limit_are_put_together_with_their_neighbours() -> None:
    values = RNG.normal(size=(3, 2 * MAX_CHANNELS + 5)).astype(np.float32)

    found = channels_of(values, "float32", 1.0)

    assert found is not None
    assert (found.channels, found.width, len(found.amax)) == (2 * MAX_CHANNELS + 5, 3, 2733)
    assert found.amax[-1] == np.abs(values[:, 2732 * 3 :]).max()
    assert found.largest(1)[0][1] == np.abs(values).max()


def test_a_tally_keeps_channels_of_four_lengths_and_counts_the_records_of_others() -> None:
    together = Tally()
    for length in (2, 3, 4, 5, 6, 6, 2):
        one = channels_of(np.full((1, length), length, np.float32), "float32", 1.0)
        together.add(Tally(1, channels=one))

    assert {length: channels.records for length, channels in together.channels.items()} == {
        2: 2,
        3: 1,
        4: 1,
        5: 1,
    }
    assert together.other_channels == 2


def test_what_is_added_to_a_tally_stays_as_it_was() -> None:
    one = channels_of(np.ones((1, 2), np.float32), "float32", 0.1)
    before, together = Tally(1, channels=one), Tally()
    for _ in range(2):
        together.add(before)

    assert (before.channels[2].records, together.channels[2].records) == (1, 2)
    assert together.channels[2].outliers.tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(), (0, 4), (4, 0)])
def test_a_tensor_without_channels_or_values_has_none(shape: tuple[int, ...]) -> None:
    assert channels_of(np.zeros(shape, np.float32), "float32", None) is None


def test_the_shape_of_a_distribution_is_that_of_its_values() -> None:
    bits = bf16(RNG.standard_t(3, size=200_000).astype(np.float32))
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).double().numpy()
    sigma, magnitude = values.std(), np.abs(values)

    found = shape_of(distribution_of(bits, "bfloat16"))

    assert found.crest_factor == pytest.approx(magnitude.max() / np.sqrt((values**2).mean()))
    assert found.kurtosis == pytest.approx(((values - values.mean()) ** 4).mean() / sigma**4)
    assert found.outlier_percent == pytest.approx(100 * (magnitude > 6 * sigma).mean())
    assert found.dynamic_range == pytest.approx(np.log2(magnitude.max() / magnitude[magnitude > 0].min()))


def test_a_normal_distribution_has_the_kurtosis_three_and_a_constant_one_none() -> None:
    normal = shape_of(distribution_of(bf16(RNG.normal(size=300_000).astype(np.float32)), "bfloat16"))
    constant = shape_of(distribution_of(np.full(10, 2.0, np.float32), "float32"))
    huge = shape_of(distribution_of(np.array([3e38, -1.0], np.float32), "float32"))

    assert normal.kurtosis == pytest.approx(3, abs=0.05)
    assert (constant.kurtosis, constant.crest_factor, constant.dynamic_range) == (None, 1.0, 0.0)
    assert huge.crest_factor == pytest.approx(math.sqrt(2))
    assert shape_of(Distribution()).crest_factor is None
    assert shape_of(distribution_of(np.zeros(3, np.float32), "float32")).outlier_percent == 0.0


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=20)
def test_the_shape_is_the_same_to_the_bit_in_whatever_order_records_are_added(
    lengths: list[int], random: Random
) -> None:
    bits = np.random.default_rng(sum(lengths)).integers(0, 65536, sum(lengths), np.uint16)
    parts = np.split(bits, np.cumsum(lengths)[:-1])
    random.shuffle(parts)
    together = Distribution()
    for part in parts:
        together.add(distribution_of(part, "bfloat16"))

    assert shape_of(together) == shape_of(distribution_of(bits, "bfloat16"))


@pytest.mark.parametrize("name", RANGE_BLOCKS)
def test_the_ranges_of_blocks_are_those_of_each_block(name: str) -> None:
    block, axis = RANGE_BLOCKS[name]
    values = (RNG.normal(size=(2, 64, 96)) * np.logspace(-3, 3, 96)).astype(np.float32)
    values[0, :32, :32] = 0
    values[1, 0, 0], values[1, 5, 5] = math.nan, math.inf

    found = block_ranges(torch.from_numpy(values), block, axis)

    high, wide = tile = tuple(map(int, name.split("x")))
    tiles = values.reshape(2, 64 // high, high, 96 // wide, wide).swapaxes(2, 3).reshape(-1, math.prod(tile))
    magnitude = np.where(np.isfinite(tiles), np.abs(tiles.astype(np.float64)), 0)
    some = magnitude[magnitude.max(1) > 0]
    ratios = np.log2(some.max(1)) - np.log2(np.where(some > 0, some, np.inf).min(1))
    assert found is not None
    assert (found.count, found.empty) == (len(tiles), len(tiles) - len(some))
    assert found.widest == pytest.approx(ratios.max())
    assert found.amax == counted(np.log2(some.max(1)))
    assert found.ranges == counted(ratios)
    twice = BlockRanges()
    twice.add(found)
    twice.add(found)
    assert (twice.count, twice.widest) == (2 * found.count, found.widest)
    assert twice.ranges == {level: 2 * count for level, count in found.ranges.items()}


def counted(values: np.ndarray) -> dict[int, int]:
    present, often = np.unique(np.floor(values).astype(int), return_counts=True)
    return dict(zip(present.tolist(), often.tolist(), strict=True))


def test_a_vector_has_blocks_along_its_only_axis_alone() -> None:
    vector = torch.arange(1.0, 41.0)

    found = {name: block_ranges(vector, *RANGE_BLOCKS[name]) for name in RANGE_BLOCKS}

    assert found["32x1"] is found["32x32"] is None
    assert found["1x32"] is not None
    assert (found["1x32"].count, found["1x32"].widest) == (2, 5.0)


def test_the_kept_lengths_are_the_same_in_whatever_order_and_parts_records_come() -> None:
    def added(lengths: list[int]) -> Tally:
        tally = Tally()
        for length in lengths:
            one = channels_of(np.full((1, length), length, np.float32), "float32", 1.0)
            tally.add(Tally(1, channels=one))
        return tally

    lengths = [9, 3, 8, 2, 9, 7, 4, 5, 3, 6]
    parts = [added(lengths[:4]), added(lengths[4:7]), added(lengths[7:])]
    right = Tally()
    for part in (*parts[1:], parts[0]):
        right.add(part)
    for tally in (added(lengths), added(lengths[::-1]), right):
        kept = {length: channels.records for length, channels in tally.channels.items()}
        assert (kept, tally.other_channels) == ({2: 1, 3: 2, 4: 1, 5: 1}, 5)
