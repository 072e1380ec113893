"""Groups against numpy on the concatenated values of what was put into each."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capd.analyze.distribution import distribution_of
from capd.analyze.groups import Groups, Tally, in_order
from capd.store.format.statistics import public, summarise

RNG = np.random.default_rng(2)
GROUPINGS = {(): True, ("layer",): True, ("layer", "rank"): False}


def tally(values: np.ndarray) -> Tally:
    stats = public(summarise(values, "float32"))
    return Tally(1, values.nbytes, stats, distribution_of(values, "float32"))


def test_each_group_has_the_statistics_of_all_its_values() -> None:
    groups = Groups(GROUPINGS)
    put: dict[tuple[int | None, int], list[np.ndarray]] = {}
    for number in range(200):
        layer, rank = (None, 3, 12)[number % 3], number % 2
        values = RNG.integers(-8, 8, 50).astype(np.float32)
        put.setdefault((layer, rank), []).append(values)
        for grouping, of in (((), ()), (("layer",), (layer,)), (("layer", "rank"), (layer, rank))):
            groups.add(grouping, of, tally(values))

    assert list(groups.by("layer", "rank")) == [(None, 0), (None, 1), (3, 0), (3, 1), (12, 0), (12, 1)]
    assert groups.values("layer") == [None, 3, 12]
    for (layer,), found in groups.by("layer").items():
        values = np.concatenate([part for (of, _), parts in put.items() if of == layer for part in parts])
        assert (found.records, found.raw_bytes) == (values.size // 50, values.nbytes)
        assert (found.stats.count, found.stats.zero) == (values.size, np.count_nonzero(values == 0))
        assert (found.stats.min, found.stats.max) == (values.min(), values.max())
        np.testing.assert_allclose(found.stats.std, values.astype(float).std(), rtol=1e-12)
        assert found.distribution is not None
        np.testing.assert_allclose(found.distribution.quantiles([0.1, 0.9]), np.quantile(values, [0.1, 0.9]))
    whole = np.concatenate([part for parts in put.values() for part in parts])
    assert groups.whole().stats.sum == whole.sum()
    assert all(found.distribution is None for found in groups.by("layer", "rank").values())


PARTS = [
    tally((RNG.normal(size=300) * 10.0 ** RNG.integers(-9, 9, 300)).astype(np.float32)) for _ in range(40)
]


@given(st.permutations(range(len(PARTS))), st.lists(st.integers(1, len(PARTS)), max_size=4))
def test_statistics_are_the_same_to_the_bit_in_every_order_and_grouping(
    order: list[int], cuts: list[int]
) -> None:
    one_by_one, together = Tally(), Tally()
    for part in PARTS:
        one_by_one.add(part, values=False)
    for start, end in pairwise(sorted({0, *cuts, len(order)})):
        group = Tally()
        for at in order[start:end]:
            group.add(PARTS[at], values=False)
        together.add(group, values=False)

    assert together.stats == one_by_one.stats
    assert together.stats.sum == math.fsum(part.stats.sum for part in PARTS)
    assert together.stats.sum_sq == math.fsum(part.stats.sum_sq for part in PARTS)


def test_sums_beyond_float64_stay_beyond_it() -> None:
    huge = public(summarise(np.array([1e300, 1.0]), "float64"))
    together = Tally()
    for _ in range(3):
        together.add(Tally(1, 0, huge))

    assert (together.stats.sum_sq, together.stats.std, together.stats.sum) == (math.inf, math.inf, 3e300)


def test_no_record_is_a_tally_of_nothing() -> None:
    groups = Groups(GROUPINGS)

    assert (groups.whole().records, groups.whole().stats.count, groups.whole().stats.min) == (0, 0, None)
    assert groups.by("layer") == {}


def test_none_comes_before_numbers_and_words() -> None:
    assert in_order([3, None, 0]) == [None, 0, 3]
    assert in_order(["b", "", "a"]) == ["", "a", "b"]
