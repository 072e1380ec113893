"""Errors of formats: against torch.ao.ns and numpy in float64, and the same to the bit in any order and grouping."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.ao.ns.fx.utils import compute_cosine_similarity, compute_normalized_l2_error, compute_sqnr

from capd.analyze.distribution import distribution_of
from capd.analyze.errors import Errors, errors_of, merged
from capd.analyze.exact import rounded
from capd.analyze.format_choice import FormatChoice, choices
from capd.analyze.measure import measured_patterns
from capd.formats import FormatError, decode, encode

FORMATS = (
    "bf16,fp16,fp8,fp8:e5m2,fp8:128,fp8:rceil,mxfp8,mxfp8:e5m2:rceil,mxfp8:axis=-2,mxfp6,mxfp6:e3m2:ceil,mxfp4,"
    "mxfp4:even,mxfp4:axis=0,nvfp4,nvfp4:16x16,nvfp4:tensor_scale=no,hifp8,hifp8:saturate,mxfp8:legacy,hifp8:legacy"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def values_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    spread = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    spread *= torch.logspace(-6, 3, shape[-1])
    spread[0, :3] = 0
    return spread.to(dtype)


@cache
def chosen(text: str) -> FormatChoice:
    [choice] = choices(text)
    return choice


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", FORMATS.split(","))
@pytest.mark.parametrize(
    "shape", [(6, 50), (96, 128)], ids=str
)  # with blocks to fill; beyond the histogram's threshold
def test_every_metric_is_what_numpy_finds_in_float64(
    text: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    choice, x = chosen(text), values_of(dtype, *shape)
    x[1, 0], x[1, 1], x[4, 5] = math.nan, math.inf, -math.inf

    found = errors_of(x, choice)

    before = x.double().numpy()
    after = decode(encode(x, choice.fmt, **choice.options)).double().numpy()
    usable = np.isfinite(before) & np.isfinite(after)
    assert (found.records, found.count, found.nan, found.inf) == (1, x.numel(), 1, 2)
    assert found.lost == (np.isfinite(before) & ~np.isfinite(after)).sum()
    assert found.underflows == ((before != 0) & (after == 0)).sum()
    assert found.compared == usable.sum()
    u, v = before[usable], after[usable]
    d = v - u
    expected = {
        "sqnr_db": 10 * np.log10((u**2).sum() / (d**2).sum()) if d.any() else math.inf,
        "mse": (d**2).mean(),
        "rmse": np.sqrt((d**2).mean()),
        "mae": np.abs(d).mean(),
        "relative": np.abs(d).sum() / np.abs(u).sum(),
        "relative_mse": (d**2).mean() / (u**2).mean(),
        "normalised_l2": np.linalg.norm(d) / np.linalg.norm(u),
        "cosine": (u * v).sum() / (np.linalg.norm(u) * np.linalg.norm(v)),
        "psnr_db": 20 * np.log10(np.abs(u).max() / np.sqrt((d**2).mean())) if d.any() else math.inf,
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    assert (found.absmax, found.max_abs) == (np.abs(u).max(), np.abs(d).max())


@pytest.mark.parametrize("text", ["mxfp8", "mxfp4", "nvfp4", "hifp8", "fp8"])
def test_sqnr_cosine_and_normalised_l2_are_those_of_torch(text: str) -> None:
    choice, x = chosen(text), values_of(torch.float32, 64, 96)

    found = errors_of(x, choice)

    y = decode(encode(x, choice.fmt, **choice.options))
    assert found.sqnr_db == pytest.approx(compute_sqnr(x, y).item(), rel=1e-5)
    assert found.cosine == pytest.approx(compute_cosine_similarity(x, y).item(), rel=1e-6)
    assert found.normalised_l2 == pytest.approx(compute_normalized_l2_error(x, y).item(), rel=1e-5)


@pytest.mark.parametrize(
    "text", ["mxfp8", "mxfp8:axis=0", "mxfp4:even", "nvfp4", "nvfp4:16x16", "fp8:128", "fp8"]
)
def test_saturations_and_flushes_are_counted_against_the_scale_of_each_element(text: str) -> None:
    choice, x = chosen(text), values_of(torch.float32, 80, 144)
    largest, smallest = {"mxfp4": (6, 1), "nvfp4": (6, 1)}.get(choice.fmt, (448, 2.0**-6))

    found = errors_of(x, choice)

    ones = encode(x, choice.fmt, **choice.options)
    one = 0x38 if largest == 448 else 2  # the code of 1
    scales = decode(type(ones)(**{**{name: getattr(ones, name) for name in ones.__dataclass_fields__},
                                  "payload": torch.full_like(ones.payload, one)}))  # fmt: skip
    magnitude = x.abs().double()
    # The scale of a small block of nvfp4 is 0: it has no value but 0.
    beyond = (magnitude > largest * scales.double() * (1 + 2.0**-21)) & (scales > 0)
    assert found.saturations == beyond.sum()
    assert found.flushes == (((magnitude < smallest * scales.double()) | (scales == 0)) & (x != 0)).sum()
    if text == "mxfp8":
        assert found.saturations > 0
        assert found.blocks is not None
        amax = x.reshape(80, -1).unfold(1, 32, 32).abs().amax(-1)  # of the whole blocks: 4 of 5 in each row
        assert found.blocks.count == 80 * 5
        assert (amax > 448 * scales[:, :128:32]).sum() <= found.blocks.saturated


def test_values_of_a_block_whose_scale_rounds_to_zero_are_flushed_and_none_is_saturated() -> None:
    x = torch.full((64, 32), 1e-6)
    x[0] = 10

    found = errors_of(x, chosen("nvfp4"))

    assert (found.underflows, found.flushes, found.saturations) == (63 * 32, 63 * 32, 0)
    assert found.blocks is not None
    assert (found.blocks.saturated, found.blocks.zero) == (0, 0)


@pytest.mark.parametrize("text", ["bf16", "fp16", "fp8", "fp8:e5m2", "hifp8", "hifp8:legacy", "hifp8:hybrid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_histogram_gives_to_the_bit_what_the_elements_give(text: str, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    few = every[torch.randint(65536, (8000,), generator=torch.Generator().manual_seed(1))]

    found = errors_of(few, chosen(text))  # below the threshold: by its elements

    name = str(dtype).removeprefix("torch.")
    counted = measured_patterns(distribution_of(few.view(torch.int16).numpy(), name), chosen(text).spec)
    assert counted.count == found.count == 8000
    assert [counted.nan, counted.inf, counted.lost] == [found.nan, found.inf, found.lost]
    assert [counted.underflows, counted.saturations, counted.flushes] == [
        found.underflows, found.saturations, found.flushes,
    ]  # fmt: skip
    assert (counted.absmax, counted.max_abs) == (found.absmax, found.max_abs)
    assert counted.mse == pytest.approx(
        found.mse, rel=1e-12
    )  # the elements' sums are float64 sums of a piece
    assert counted.cosine == pytest.approx(found.cosine, rel=1e-12)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_a_tensor_in_parts_has_the_errors_of_the_whole_to_the_bit(lengths: list[int], random: Random) -> None:
    spec = chosen("hifp8").spec
    bits = np.random.default_rng(sum(lengths)).integers(0, 65536, sum(lengths), np.uint16)

    parts = np.split(bits, np.cumsum(lengths)[:-1])
    random.shuffle(parts)
    found = merged(measured_patterns(distribution_of(part, "bfloat16"), spec) for part in parts)

    whole = measured_patterns(distribution_of(bits, "bfloat16"), spec)
    whole.records = len(parts)
    assert found == whole


RECORDS = [
    errors_of(values_of(dtype, 40, 64, seed=seed), chosen("nvfp4"), per_block=True)
    for seed, dtype in enumerate(DTYPES * 2)
]


@given(st.permutations(range(len(RECORDS))), st.lists(st.integers(1, len(RECORDS)), max_size=3))
@settings(deadline=None)
def test_records_add_up_to_the_same_bits_in_every_order_and_grouping(
    order: list[int], cuts: list[int]
) -> None:
    ends = sorted({0, *cuts, len(order)})
    groups = [[RECORDS[at] for at in order[start:end]] for start, end in pairwise(ends)]

    assert merged(merged(group) for group in groups) == merged(RECORDS)


def test_what_is_left_out_is_counted_with_its_neighbours_in_the_block() -> None:
    x = torch.ones(2, 64)
    x[0, 3] = math.nan
    x[1, 40] = math.inf

    found = errors_of(x, chosen("mxfp8"))

    assert (found.nan, found.inf, found.lost, found.compared) == (1, 1, 62, 64)
    assert found.blocks is not None
    assert (found.blocks.count, found.blocks.invalid, found.lost_percent) == (4, 2, 100 * 62 / 128)
    assert (found.sqnr_db, found.mse) == (math.inf, 0.0)


def test_a_format_that_overflows_to_infinity_loses_values_and_one_that_saturates_keeps_them() -> None:
    x = torch.tensor([[1.0, 50000.0, -60000.0, 0.0]])

    lossy, saturating = errors_of(x, chosen("hifp8")), errors_of(x, chosen("hifp8:saturate"))

    assert (lossy.lost, lossy.saturations, lossy.max_abs) == (2, 2, 0.0)
    assert (saturating.lost, saturating.saturations, saturating.max_abs) == (0, 2, 60000 - 32768)


@pytest.mark.parametrize("text", ["mxfp8", "fp8", "hifp8"])
@pytest.mark.parametrize("shape", [(0,), (0, 32), ()], ids=str)
def test_tensors_without_elements_or_dimensions_have_no_quotients_to_show(
    text: str, shape: tuple[int, ...]
) -> None:
    found = errors_of(torch.zeros(shape), chosen(text))

    assert found.count == math.prod(shape)
    assert found.sqnr_db is found.cosine is found.psnr_db is found.normalised_l2 is None
    assert (found.mse is None) == (not found.count)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((70, 103), "mxfp4"),
        ((3, 70, 131), "mxfp8:axis=-2"),
        ((3, 70, 131), "mxfp8:axis=0"),
        ((9001,), "mxfp8"),
        ((103, 210), "nvfp4:16x16"),
        ((103, 210), "nvfp4:8x16:axis=-2"),
        ((2, 33, 9001), "fp8:128x128"),
        ((2, 3, 4097), "hifp8"),
    ],
)
def test_tensors_of_several_slabs_and_of_odd_shapes_are_measured_as_in_one_go(
    shape: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(text)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    whole = errors_of(x, choice, per_block=True)
    y = decode(encode(x, choice.fmt, **choice.options)).double()
    monkeypatch.setattr("capd_client.formats.blocks.SLAB_VALUES", 4096)
    monkeypatch.setattr("capd_client.formats.blocks.PIECE_VALUES", 1000)

    found = errors_of(x, choice, per_block=True)

    assert found.mse == pytest.approx(((y - x.double()) ** 2).mean().item(), rel=1e-12)
    assert found.underflows == ((y == 0) & (x != 0)).sum()
    assert (found.blocks, found.saturations) == (whole.blocks, whole.saturations)


def test_blocks_say_which_scales_they_took_and_how_far_these_lie_apart() -> None:
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 32], x[0, 64] = 1.0, 4.0, 4.0

    blocks = errors_of(x, chosen("mxfp8")).blocks
    wide = errors_of(x * 1.99, chosen("mxfp8")).blocks

    assert blocks is not None
    assert wide is not None
    assert (blocks.count, blocks.zero, blocks.saturated) == (4, 1, 0)
    assert blocks.exponents() == {-8: 1, -6: 2}
    assert blocks.scale_log2_mean == pytest.approx(-20 / 3)
    assert blocks.scale_log2_std == pytest.approx(np.std([-8, -6, -6]))
    assert (wide.saturated, wide.saturated_percent) == (3, 75.0)  # 1.99 * 256 is beyond 448


def test_the_blocks_own_errors_are_those_of_each_block() -> None:
    x = values_of(torch.float32, 40, 96)
    choice = chosen("mxfp8")

    blocks = errors_of(x, choice, per_block=True).blocks

    y = decode(encode(x, choice.fmt, **choice.options)).double().reshape(-1, 32)
    rows = x.double().reshape(-1, 32)
    signal, noise = (rows**2).sum(-1), ((y - rows) ** 2).sum(-1)
    levels = torch.floor(10 * torch.log10(signal / noise)).to(torch.int64)
    values, counts = levels.unique(return_counts=True)
    assert blocks is not None
    assert blocks.sqnr == dict(zip(values.tolist(), counts.tolist(), strict=True))
    expected = np.quantile(levels.numpy(), [0.05, 0.5]).tolist()
    assert blocks.sqnr_quantiles((0.05, 0.5)) == pytest.approx(expected)


def test_a_dtype_or_an_axis_that_a_format_cannot_take_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="int64"):
        errors_of(torch.ones(4, dtype=torch.int64), chosen("mxfp8"))
    with pytest.raises(FormatError, match="axis of mxfp8 cannot be -2"):
        errors_of(torch.ones(4), chosen("mxfp8:axis=-2"))


def test_the_standard_error_of_the_sqnr_is_that_of_the_ratio_over_records() -> None:
    choice = chosen("mxfp4")
    each = [errors_of(values_of(torch.bfloat16, 40, 64, seed=seed) * (1 + seed), choice) for seed in range(7)]
    a, b = (np.array([float(rounded(getattr(one.sums, name))) for one in each]) for name in ("x2", "d2"))

    found = merged([merged(each[:3]), merged(each[3:])])

    ratio, n = b.sum() / a.sum(), len(each)
    error = math.sqrt(n / (n - 1) * ((b - ratio * a) ** 2).sum()) / a.sum()
    assert found.sqnr_db_error == pytest.approx(10 / math.log(10) * error / ratio, rel=1e-12)
    assert found.sqnr_db_error == merged(each[::-1]).sqnr_db_error
    assert each[0].sqnr_db_error is merged(each[:1]).sqnr_db_error is None
    assert merged([each[0]] * 4).sqnr_db_error == pytest.approx(0, abs=1e-9)


def test_stochastic_rounding_repeats_itself() -> None:
    x = values_of(torch.bfloat16, 100, 200)
    choice = chosen("mxfp4:stochastic")

    assert errors_of(x, choice) == errors_of(x, choice)
    assert errors_of(x, choice) != errors_of(x, chosen("mxfp4"))
    assert Errors() == merged([])
