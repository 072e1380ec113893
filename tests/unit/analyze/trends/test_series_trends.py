"""Metrics that follow a series from step to step: against loops over the steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.analyze.format_choice import choices
from capd.analyze.grids import grids
from capd.analyze.trends.amax_history import AmaxRecord, DelayedScales, DelayedScaling
from capd.analyze.trends.hot_channels import HotChannels, HotSets, channel_energies
from capd.analyze.trends.oscillation import Flips, Oscillation, code_snapshot, edge_distances
from capd.formats import encode, qdq

RNG = np.random.default_rng(11)


def followed(tensors: Sequence[torch.Tensor], label: str) -> list[Oscillation]:
    flips, found = Flips(), []
    for iteration, one in enumerate(tensors):
        snapshot, problems = code_snapshot(one, choices(label))
        assert snapshot is not None
        assert problems == []
        for at, name, sums in flips.add(iteration, snapshot):
            assert (at, name) == (iteration, label)
            found.append(sums)
    assert list(flips.close()) == []
    return found


def merged(several: Sequence[Oscillation]) -> Oscillation:
    found = Oscillation()
    for one in several:
        found.add(one)
    return found


@pytest.mark.parametrize(
    ("label", "low", "high"), [("hifp8", 1.0, 1.125), ("mxfp4", 4.0, 6.0), ("nvfp4", 4.0, -4.0)]
)
def test_two_alternating_codes_oscillate_wholly(label: str, low: float, high: float) -> None:
    steps = [torch.full((4, 32), (low, high)[at % 2]) for at in range(6)]
    numbers = merged(followed(steps, label)).numbers()
    assert numbers["changed_percent"] == 100
    assert numbers["reversed_percent"] == 100
    assert numbers["ratio"] == pytest.approx(1.0, rel=1e-6)
    assert numbers["flips_per_move"] == pytest.approx(1 / abs(high - low))
    assert numbers["edge_distance"] == pytest.approx(0.5, abs=1e-6)


def test_weights_that_stand_still_or_go_one_way_do_not_oscillate() -> None:
    still = merged(followed([torch.full((2, 32), 1.3)] * 4, "hifp8")).numbers()
    away = merged(followed([torch.full((2, 32), 1 + 0.125 * at) for at in range(7)], "hifp8")).numbers()
    assert (still["changed_percent"], still["ratio"], still["flips_per_move"]) == (0, None, None)
    assert (away["changed_percent"], away["reversed_percent"]) == (100, 0)


@pytest.mark.parametrize("label", ["mxfp4", "nvfp4", "mxfp8", "hifp8"])
def test_changes_are_those_of_the_codes_of_each_step(label: str) -> None:
    weight = RNG.normal(size=(16, 64)).astype(np.float32)
    steps = [
        torch.from_numpy(weight + 0.05 * RNG.normal(size=weight.shape).astype(np.float32)) for _ in range(5)
    ]
    [choice] = choices(label)
    made = [encode(one, label) for one in steps]
    found = merged(followed(steps, label))

    changed = back = 0
    last = np.zeros(weight.shape)
    moved = turned = 0.0
    for at, (before, after) in enumerate(itertools.pairwise(made)):
        values = [qdq(steps[at + place], label).double().numpy() for place in (0, 1)]
        # Minus zero is zero.
        codes = [
            np.where(v == 0, 0, one.payload.numpy()) for v, one in zip(values, (before, after), strict=True)
        ]
        is_changed = codes[0] != codes[1]
        changed += int(is_changed.sum())
        moved += float((steps[at + 1].double() - steps[at].double()).abs().sum())
        turned += float(np.abs(values[1] - values[0]).sum())
        way = np.where(is_changed, np.sign(values[1] - values[0]), 0)
        back += int((way * last < 0).sum())
        last = np.where(way == 0, last, way)
    assert (found.pairs, found.weights) == (4, 4 * weight.size)
    assert (found.changed, found.reversed) == (changed, back)
    assert found.numbers()["ratio"] == pytest.approx(turned / moved, rel=1e-9)
    assert found.numbers()["flips_per_move"] == pytest.approx(changed / moved, rel=1e-9)
    if choice.axis is not None:
        scales = [one.scale.numpy() for one in made if one.scale is not None]
        assert found.scales_changed == sum(int((a != b).sum()) for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2", "e2m3", "e3m2", "hifp8"])
def test_the_distance_to_an_edge_is_that_to_the_middle_of_the_neighbours(name: str) -> None:
    grid = grids()[name]
    held = [0.0]
    for exponent, bits in sorted(grid.mantissa_bits.items()):
        held += [2.0**exponent + place * 2.0 ** (exponent - bits) for place in range(1 << bits)]
    if name != "hifp8":
        step = grid.smallest
        held += [place * step for place in range(1, round(grid.normal / step))]
    table = np.unique([value for value in held if value <= grid.largest])
    values = np.concatenate(
        [RNG.uniform(0, grid.largest, 2000), RNG.uniform(0, 4 * grid.normal, 2000), table]
    )
    at = np.clip(np.searchsorted(table, values, side="right"), 1, table.size - 1)
    low, high = table[at - 1], table[at]

    found = edge_distances(values, grid)

    on_top = values == table[-1]
    expected = np.where(on_top, 0.5, np.abs(values - (low + high) / 2) / (high - low))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_even_spreads_are_a_quarter_of_a_step_from_an_edge() -> None:
    found = merged(followed([torch.linspace(1, 1.875, 100_001).reshape(1, -1)], "hifp8")).numbers()
    assert found["edge_distance"] == pytest.approx(0.25, abs=1e-3)
    assert found["near_edge_percent"] == pytest.approx(10, abs=0.1)
    assert (found["pairs"], found["changed_percent"]) == (0, None)


def test_nan_is_compared_with_nothing_and_another_shape_begins_anew() -> None:
    hole = torch.ones(1, 32)
    hole[0, 3], hole[0, 4] = math.nan, math.inf
    [_, one, other] = followed([torch.ones(1, 32), hole, torch.ones(2, 32)], "hifp8")
    assert (one.weights, one.changed, one.placed) == (30, 0, 30)
    assert (other.pairs, other.weights) == (0, 0)


def test_of_several_records_of_a_step_the_first_counts() -> None:
    flips = Flips()
    snapshots = [code_snapshot(torch.full((1, 32), value), choices("hifp8"))[0] for value in (1.0, 2.0, 1.0)]
    assert None not in snapshots
    assert [at for one in zip((0, 0, 1), snapshots, strict=True) for at, _, _ in flips.add(*one)] == [0, 1]  # type: ignore[arg-type]


def hot_sets(steps: Sequence[torch.Tensor], most: int) -> HotChannels:
    following, found = HotSets(most), HotChannels()
    for iteration, one in enumerate(steps):
        energies = channel_energies(one)
        assert energies is not None
        for _, _, sums in following.add(iteration, energies):
            found.add(sums)
    for _, _, sums in following.close():
        found.add(sums)
    return found


def test_hot_channels_are_compared_as_sets() -> None:
    steps = [torch.from_numpy(RNG.normal(size=(30, 40)) * RNG.uniform(0.5, 2, 40)) for _ in range(6)]
    energies = [(one.float().double().numpy() ** 2).sum(0) for one in steps]
    sets = [set(np.argsort(-one)[:5].tolist()) for one in energies]

    numbers = hot_sets(steps, 5).numbers()

    def jaccard(a: set[int], b: set[int]) -> float:
        return len(a & b) / len(a | b)

    assert numbers["jaccard_previous"] == pytest.approx(
        np.mean([jaccard(*one) for one in itertools.pairwise(sets)])
    )
    assert numbers["jaccard_first"] == pytest.approx(np.mean([jaccard(sets[0], one) for one in sets[1:]]))
    top = sum(one[list(own)].sum() for one, own in zip(energies, sets, strict=True))
    assert numbers["energy_percent"] == pytest.approx(100 * top / sum(one.sum() for one in energies))
    assert (numbers["sets"], numbers["hot"], numbers["channels"]) == (6, 5, 40)


def test_channels_that_stay_and_channels_that_leave() -> None:
    stays = torch.ones(4, 32)
    stays[:, 7] = 100
    leaves = torch.ones(4, 32)
    leaves[:, 9] = 100
    same, other = hot_sets([stays] * 3, 1).numbers(), hot_sets([stays, leaves, stays], 1).numbers()
    assert (same["jaccard_previous"], same["jaccard_first"]) == (1, 1)
    assert (other["jaccard_previous"], other["jaccard_first"]) == (0, 0.5)
    assert same["energy_percent"] == pytest.approx(100 * 1e4 / (1e4 + 31))


def test_at_most_a_quarter_of_the_channels_is_hot() -> None:
    assert hot_sets([torch.ones(2, 8)], 100).numbers()["hot"] == 2
    assert hot_sets([torch.ones(2, 1)], 100).numbers()["hot"] == 1


def test_zeros_scalars_and_empty_tensors_have_no_hot_channel() -> None:
    assert hot_sets([torch.zeros(2, 8)], 2).numbers()["energy_percent"] is None
    assert channel_energies(torch.tensor(3.0)) is None
    assert channel_energies(torch.zeros(0, 8)) is None
    np.testing.assert_array_equal(channel_energies(torch.tensor([[1.0, math.nan], [math.inf, 2.0]])), [1, 4])


def test_the_records_of_a_step_make_one_set() -> None:
    following = HotSets(1)
    first, second = np.array([3.0, 1.0, 0, 0]), np.array([0, 4.0, 0, 0])
    done = [*following.add(0, first), *following.add(0, second), *following.close()]
    [(iteration, _, sums)] = done
    assert (iteration, sums.hot_energy.value, sums.energy.value) == (0, 5.0, 8.0)


def delayed(steps: Sequence[np.ndarray], window: int, margin: int) -> DelayedScaling:
    following, found = DelayedScales((window,), (margin,)), DelayedScaling()
    for iteration, one in enumerate(steps):
        for _, _, sums in following.add(iteration, AmaxRecord(float(one.max()), one)):
            found.add(sums)
    for _, label, sums in following.close():
        assert label == f"window={window} margin={margin}"
        found.add(sums)
    return found


@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_delayed_scales_are_those_of_a_loop(steps: list[list[float]], window: int, margin: int) -> None:
    amax = [max(one) for one in steps]
    judged = overflowed = beyond = counted = 0
    waste = []
    for at, one in enumerate(steps):
        limit = max(amax[max(0, at - window) : at], default=0.0) * 2**margin
        if not limit:
            continue
        judged += 1
        counted += len(one)
        beyond += sum(value > limit for value in one)
        overflowed += amax[at] > limit
        if 0 < amax[at] <= limit:
            waste.append(math.log2(limit) - math.log2(amax[at]))

    found = delayed([np.array(one) for one in steps], window, margin)

    assert (found.steps, found.overflowed) == (judged, overflowed)
    assert (found.counted, found.beyond) == (counted, beyond)
    assert found.numbers()["wasted_binades"] == (pytest.approx(np.mean(waste)) if waste else None)
    assert found.amax.value == max(amax)


def test_growth_overflows_a_delayed_scale_until_a_margin_holds_it() -> None:
    steps = [np.array([2.0**at, 1.0]) for at in range(6)]
    tight, loose = delayed(steps, 16, 0).numbers(), delayed(steps, 16, 1).numbers()
    assert (tight["overflow_percent"], tight["overflow_steps_percent"], tight["most_excess"]) == (50, 100, 1)
    assert (loose["overflow_percent"], loose["wasted_binades"]) == (0, 0)


def test_statistics_alone_tell_overflowing_steps_but_no_share_of_values() -> None:
    following, found = DelayedScales((1,), (0,)), DelayedScaling()
    for iteration, amax in enumerate((1.0, 2.0, 1.0)):
        for _, _, sums in following.add(iteration, AmaxRecord(amax, None)):
            found.add(sums)
    for _, _, sums in following.close():
        found.add(sums)
    numbers = found.numbers()
    assert (numbers["overflow_percent"], numbers["overflow_steps_percent"], numbers["wasted_binades"]) == (
        None,
        50,
        1,
    )
