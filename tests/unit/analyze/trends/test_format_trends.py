"""Metrics of formats on one tensor: against numpy in float64 on the codes and scales of `capd.formats`."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.analyze.format_choice import choices
from capd.analyze.trends.block_scales import BlockScaleCounts, block_scale_counts
from capd.analyze.trends.grid_ends import DeadZone, LastBucket, grid_ends
from capd.analyze.trends.noise import NOISE_LIMIT, NoiseRatio, noise_ratios
from capd.formats import encode, qdq

BLOCKED = "mxfp8,mxfp4,mxfp4:rceil,nvfp4,mxfp4:axis=0"
LARGEST = {"mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}
SMALLEST = {"mxfp8": 2.0**-9, "mxfp4": 0.5, "nvfp4": 0.5}


def spread(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-4, 1, shape[-1])).to(dtype)


def options_of(label: str) -> dict[str, object]:
    [choice] = choices(label)
    return {"fmt": choice.fmt, **choice.options}


def units(x: torch.Tensor, label: str) -> np.ndarray:
    """The scale of each value, float64 of x's shape."""
    made = encode(x, **options_of(label))  # type: ignore[arg-type]
    assert made.scale is not None
    if made.fmt == "nvfp4":
        assert made.global_scale is not None
        scale = made.scale.view(torch.float8_e4m3fn).to(torch.float32) * made.global_scale
    else:
        scale = torch.exp2(made.scale.to(torch.float64) - 127)
    block, axis = made.block, made.axis
    assert isinstance(block, int)
    whole = scale.to(torch.float64).repeat_interleave(block, dim=axis)
    return whole.narrow(axis, 0, x.shape[axis]).numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", ["mxfp8", "mxfp4", "nvfp4", "hifp8", "bf16", "fp8"])
def test_the_noise_ratio_is_norm_over_norm_of_the_error(label: str, dtype: torch.dtype) -> None:
    x = spread(48, 96, dtype=dtype)
    d = qdq(x.float(), label).double() - x.double()

    found, problems = noise_ratios(x, choices(label))

    numbers = found[label].numbers()
    assert problems == []
    if not d.any():
        assert numbers["ratio"] == math.inf
        return
    std = math.sqrt(float((d**2).mean()))
    assert numbers["noise_std"] == pytest.approx(std, rel=1e-9)
    assert numbers["ratio"] == pytest.approx(
        float(x.double().norm()) / (std * math.sqrt(x.numel())), rel=1e-9
    )
    assert numbers["below_percent"] == 0


def test_noise_as_large_as_the_values_is_below_the_limit() -> None:
    # Values far below half a step become 0, so that the error is the value.
    x = torch.full((1, 32), 1e-3)
    x[0, 0] = 1.0
    small = torch.full((4, 32), 1e-12)

    [found] = noise_ratios(small, choices("hifp8"))[0].values()
    [mixed] = noise_ratios(x, choices("mxfp4"))[0].values()

    assert found.ratio == pytest.approx(1.0)
    assert found.numbers()["below_percent"] == 100
    assert pytest.approx(math.sqrt(3)) == NOISE_LIMIT
    assert mixed.ratio is not None
    assert mixed.ratio > NOISE_LIMIT


def test_zeros_alone_have_no_ratio() -> None:
    [found] = noise_ratios(torch.zeros(4, 32), choices("mxfp8"))[0].values()
    assert (found.ratio, found.numbers()["below_percent"]) == (None, None)


@pytest.mark.parametrize("label", BLOCKED.split(","))
@pytest.mark.parametrize("shape", [(64, 96), (40, 50)])
def test_the_ends_of_the_grid_are_counted_as_the_codes_say(label: str, shape: tuple[int, int]) -> None:
    x = spread(*shape)
    x[0, :40], x[3, 5] = 0.0, 0.0
    name = label.partition(":")[0]
    unit, size = units(x, label), np.abs(x.double().numpy())
    y = np.abs(qdq(x, **options_of(label)).double().numpy())  # type: ignore[arg-type]

    [dead] = grid_ends(x, choices(label), DeadZone)[0].values()
    [last] = grid_ends(x, choices(label), LastBucket)[0].values()

    assert dead.count == dead.finite == x.numel()
    assert dead.zero == int((size == 0).sum())
    assert dead.dead == int(((size > 0) & (size < unit * SMALLEST[name] / 2)).sum())
    in_last = (size > 0) & np.isclose(y, unit * LARGEST[name], rtol=1e-6)
    assert last.last == int(in_last.sum()) > 0
    assert last.beyond == int((size > unit * LARGEST[name] * (1 + 1e-6)).sum())
    assert dead.numbers()["dead_percent"] == pytest.approx(100 * dead.dead / x.numel())


def test_equal_values_near_the_top_fill_the_last_bucket() -> None:
    # 0.93 … 0.99 in blocks of their own: all become 448 * 2^-9 = 0.875.
    gamma = torch.linspace(0.93, 0.99, 64).reshape(2, 32)
    [found] = grid_ends(gamma, choices("mxfp8"), LastBucket)[0].values()
    assert found.numbers() == {
        "values": 64, "last_percent": 100.0, "beyond_percent": 100.0, "blocks": 2, "full_blocks_percent": 100.0,
    }  # fmt: skip


def test_nan_and_inf_count_in_no_share() -> None:
    x = torch.ones(2, 32)
    x[0, 0], x[0, 1] = math.nan, math.inf
    for kind in (DeadZone, LastBucket):
        [found] = grid_ends(x, choices("mxfp4"), kind)[0].values()
        # The block of the NaN has no scale.
        assert (found.count, found.finite) == (64, 32)


@pytest.mark.parametrize("label", BLOCKED.split(","))
def test_scales_are_those_that_the_format_stores(label: str) -> None:
    x = spread(64, 96)
    x[0, :64], x[5, 40] = 0.0, math.inf
    made = encode(x, **options_of(label))  # type: ignore[arg-type]
    assert made.scale is not None
    assert isinstance(made.block, int)
    axis = made.axis
    rows = made.scale.movedim(axis, -1).reshape(-1, made.scale.shape[axis])
    lines = x.movedim(axis, -1)
    amax = lines.abs().unfold(-1, made.block, made.block).amax(-1).reshape(rows.shape)
    usable = (amax > 0) & amax.isfinite()
    kind = "e4m3" if made.fmt == "nvfp4" else "e8m0"
    values = rows.view(torch.float8_e4m3fn).double() if kind == "e4m3" else torch.exp2(rows.double() - 127)
    codes, counts = np.unique(rows[usable].numpy(), return_counts=True)
    shares = counts / counts.sum()

    [found] = block_scale_counts(x, choices(label))[0].values()

    usable &= values > 0
    logs = torch.where(usable, values, 1.0).log2().numpy()
    kept = usable.numpy()
    within = [line[here] - line[here].mean() for line, here in zip(logs, kept, strict=True) if here.any()]
    numbers = found.numbers()
    assert found.blocks == rows.numel()
    assert (found.empty, found.invalid) == (int((amax == 0).sum()), int((~amax.isfinite()).sum()))
    assert dict(found.scales) == dict(zip(codes.tolist(), counts.tolist(), strict=True))
    assert numbers["entropy_bits"] == pytest.approx(-(shares * np.log2(shares)).sum())
    assert numbers["log2_std"] == pytest.approx(logs[kept].std())
    assert numbers["row_log2_std"] == pytest.approx(math.sqrt((np.concatenate(within) ** 2).mean()))
    if kind == "e4m3":
        assert found.highest == int((rows[usable] == 126).sum()) > 0
        assert found.subnormal == int(((rows[usable] >= 1) & (rows[usable] <= 7)).sum())


def test_even_scales_have_no_entropy_and_two_have_a_bit() -> None:
    even, two = torch.ones(4, 64), torch.ones(4, 64)
    two[:, 32:] = 2.0
    [one], [other] = (block_scale_counts(x, choices("mxfp8"))[0].values() for x in (even, two))
    assert (one.entropy, one.std, one.row_std) == (0.0, 0.0, 0.0)
    assert (other.entropy, other.std, other.row_std) == (1.0, 0.5, 0.5)
    # Rows that differ only from each other do not vary within.
    [rows] = block_scale_counts(two.reshape(4, 2, 32), choices("mxfp8"))[0].values()
    assert (rows.std, rows.row_std) == (0.5, 0.0)


def test_scales_of_fp8_blocks_are_counted_by_their_exponent() -> None:
    x = torch.ones(2, 256)
    x[:, 128:] = 4.0
    [found] = block_scale_counts(x, choices("fp8:128"))[0].values()
    assert found.numbers()["lowest_percent"] is None
    assert sorted(found.scales) == [math.floor(math.log2(1 / 448)), math.floor(math.log2(4 / 448))]
    assert found.exponents == found.scales
    assert found.row_std == pytest.approx(1.0)


def test_the_smallest_and_zero_scales_of_nvfp4_are_counted() -> None:
    x = torch.full((1, 64), 1e-9)
    x[0, 0], x[0, 16], x[0, 32] = 1.0, 1 / 448 / 512, 1 / 448 / 2**20
    [found] = block_scale_counts(x, choices("nvfp4"))[0].values()
    assert (found.highest, found.lowest, found.subnormal, found.zero) == (1, 1, 1, 2)


def test_formats_without_stored_scales_and_bad_axes_say_so() -> None:
    found, problems = block_scale_counts(torch.ones(4, 4), choices("hifp8,fp8,mxfp8:axis=2"))
    assert found == {}
    assert [problem.partition(":")[0] for problem in problems] == ["hifp8", "fp8", "mxfp8"]
    assert grid_ends(torch.ones(4), choices("mxfp8:axis=2"), DeadZone)[0] == {}
    assert noise_ratios(torch.ones(4), choices("mxfp8:axis=2"))[0] == {}


@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0)])
def test_empty_tensors_have_no_shares(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for found in (
        block_scale_counts(x, choices(BLOCKED.replace(",mxfp4:axis=0", "")))[0],
        grid_ends(x, choices("mxfp8,hifp8"), DeadZone)[0],
        noise_ratios(x, choices("mxfp8,hifp8"))[0],
    ):
        assert found
        assert {value for one in found.values() for value in one.numbers().values()} <= {None, 0}


PARTS = [spread(32, 64, seed=seed, dtype=torch.bfloat16) * 10.0 ** (seed % 5 - 2) for seed in range(12)]
MEASURED = [
    (
        noise_ratios(part, choices("mxfp4"))[0]["mxfp4"],
        grid_ends(part, choices("mxfp4"), LastBucket)[0]["mxfp4"],
        block_scale_counts(part, choices("mxfp4"))[0]["mxfp4"],
    )
    for part in PARTS
]


@given(st.randoms(use_true_random=False), st.integers(1, 11))
@settings(max_examples=20)
def test_sums_are_the_same_to_the_bit_in_every_order_and_grouping(random: Random, cut: int) -> None:
    order = list(range(len(PARTS)))
    random.shuffle(order)
    for at, kind in enumerate((NoiseRatio, LastBucket, BlockScaleCounts)):
        straight, first, second = kind(), kind(), kind()
        for one in MEASURED:
            straight.add(one[at])
        for place, number in enumerate(order):
            (first if place < cut else second).add(MEASURED[number][at])
        first.add(second)
        assert first == straight
        assert first.numbers() == straight.numbers()


def test_the_sums_of_parts_are_those_of_the_whole() -> None:
    whole = torch.cat(PARTS)
    for at, found in enumerate(
        (
            noise_ratios(whole, choices("mxfp4"))[0]["mxfp4"],
            grid_ends(whole, choices("mxfp4"), LastBucket)[0]["mxfp4"],
            block_scale_counts(whole, choices("mxfp4"))[0]["mxfp4"],
        )
    ):
        merged = type(found)()
        for one in MEASURED:
            merged.add(one[at])
        numbers = found.numbers()
        assert merged.numbers() == pytest.approx(numbers, rel=1e-12)
