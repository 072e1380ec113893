"""The scales that recipes add: outer blocks, deviation, shrink and MS-EDEN, against formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd_client.formats import FormatError, decode, encode, qdq
from capd_client.formats.special import deviation
from capd_client.formats.special.deviation import clip_mask
from tests.kit.formats.oracle import float_codebook

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest element by comparing distances, ties to the even code."""
    grid = torch.tensor(E2M1, dtype=torch.float64)
    distance = (x.double().abs().unsqueeze(-1) - grid).abs()
    least = distance.amin(-1, keepdim=True)
    even = torch.tensor([0, 1] * 4)
    choice = torch.where(distance == least, even, 9).argmin(-1)
    return torch.copysign(grid[choice], x.double())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_deviation_scale_is_the_power_of_two_of_the_formula() -> None:
    x = normal(50, 32) * torch.exp(3 * normal(50, 1, seed=1))

    found = qdq(x, "mxfp4", scale_mode="std")

    sigma = x.double().std(-1, correction=0, keepdim=True)
    scale = 2.0 ** torch.floor(torch.log2(2.92247856 / 6 * sigma + 1e-8))
    assert torch.equal(found.double(), e2m1(x.double() / scale) * scale)
    assert torch.equal(decode(encode(x, "mxfp4", scale_mode="std")), found)
    assert torch.equal(clip_mask(x), (x.double() / scale).abs() <= 6)
    assert not clip_mask(torch.cat([torch.full((1, 1), 100.0), torch.zeros(1, 31)], 1))[0, 0]


def test_shrink_never_clips_and_stochastic_rounding_is_unbiased_with_it() -> None:
    x = torch.tensor([7.9, -7.5, 6.5, 5.0, 3.3, 0.1, -0.2, 1.7] + [0.0] * 24)
    draws = 10_000

    def mean_of(shrink: float | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        many = x.expand(draws, 32).contiguous()
        return qdq(many, "mxfp4", rounding="stochastic", shrink=shrink, generator=generator).double()

    shrunk, plain = mean_of(0.75), mean_of(None)
    error, spread = (shrunk.mean(0) - x).abs(), shrunk.std(0)
    assert (error <= 4 * spread / math.sqrt(draws) + 1e-6).all()
    # Without it the largest values are cut to 6.
    assert (plain.mean(0) - x)[0].abs() > 1


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}), ("fp16", {}), ("fp8", {}), ("fp8", {"elem": "e5m2", "block": 128}), ("mxfp8", {}), ("mxfp6", {}),
    ("mxfp4", {}), ("mxfp4", {"shrink": 0.75}), ("nvfp4", {}), ("nvfp4", {"block": (16, 16)}),
    ("nvfp4", {"outer": 128}), ("hifp8", {}), ("hif4", {}),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "options"), FAMILIES)
def test_each_code_of_stochastic_rounding_comes_as_often_as_it_must(
    fmt: str, options: dict[str, Any]
) -> None:
    # In hif4 the largest value 7 makes the scale 1.
    draws, value, largest = 10_000, 1.30123, 7.0 if fmt == "hif4" else 4.0
    many = torch.full((draws, 128), value)
    # A fixed largest value per block makes the scale the same in each draw.
    many[:, ::16] = largest
    generator = torch.Generator().manual_seed(7)
    found = qdq(many, fmt, rounding="stochastic", generator=generator, **options)[:, 1].double()

    low, high = found.unique().tolist()
    value = float(torch.tensor(value, dtype=torch.bfloat16)) if fmt == "hif4" else value
    share, expected = float((found == high).double().mean()), (value - low) / (high - low)
    deviation = math.sqrt(expected * (1 - expected) / draws)
    assert low < value < high
    # Chi-square with one degree of freedom: 16 is four standard deviations.
    assert ((share - expected) / deviation) ** 2 < 16


def test_outer_scales_are_those_of_128_values() -> None:
    x = normal(6, 256) * torch.exp(4 * normal(6, 256, seed=2))

    found = qdq(x, "nvfp4", outer=128)

    groups = x.view(-1, 8, 16)
    amax = groups.abs().amax(-1, keepdim=True)
    outer = amax.amax(1, keepdim=True) / 448 / 6
    codebook = float_codebook("e4m3")
    scales = torch.tensor([float(value) for value in codebook.magnitudes])
    wanted = amax / 6 / outer
    nearest = scales[(wanted - scales).abs().argmin(-1)].unsqueeze(-1)
    after = nearest * outer
    # Ties of the element are too rare to matter for random values.
    expected = e2m1(groups * (1 / after).clamp(max=torch.finfo(torch.float32).max)).float() * after
    assert torch.equal(found.view_as(expected), expected)
    # A group does not feel another one.
    changed = x.clone()
    changed[:, 128:] *= 1e6
    assert torch.equal(qdq(changed, "nvfp4", outer=128)[:, :128], found[:, :128])


def test_outer_scales_take_rows_that_do_not_fill_a_group_and_other_axes() -> None:
    x = normal(3, 200)

    found = qdq(x, "nvfp4", outer=128)

    assert torch.equal(found[:, :128], qdq(x[:, :128].contiguous(), "nvfp4", outer=128))
    assert torch.equal(qdq(x.t(), "nvfp4", outer=128, axis=0).t(), found)
    assert torch.equal(qdq(torch.zeros(2, 128), "nvfp4", outer=128), torch.zeros(2, 128))


def test_eden_is_unbiased_along_the_tensor_and_better_than_stochastic_rounding() -> None:
    x = normal(4, 128, seed=9)
    draws, generator = 10_000, torch.Generator().manual_seed(1)
    total, square = torch.zeros_like(x, dtype=torch.float64), 0.0
    for _ in range(draws // 100):
        found = (
            qdq(x.repeat(100, 1), "nvfp4", rounding="eden", generator=generator).view(100, 4, 128).double()
        )
        total += found.sum(0)
        square += float((found - x).square().sum()) / draws
    mean = total / draws

    # EDEN's promise is of the inner product with x, whose correction it is: sum x·q = sum x².
    assert float((mean * x).sum() / x.double().square().sum()) == pytest.approx(1, abs=2e-3)
    drawn = (
        qdq(x.repeat(100, 1), "nvfp4", rounding="stochastic", generator=generator).view(100, 4, 128).double()
    )
    assert square < float((drawn - x).square().sum()) / 100


def test_options_that_do_not_belong_to_a_format_are_named() -> None:
    x = torch.ones(128)
    for fmt, options, says in (
        ("mxfp8", {"outer": 128}, "mxfp8 takes no outer"),
        ("nvfp4", {"outer": 64}, "allowed are 128"),
        ("nvfp4", {"outer": 128, "block": (16, 16)}, r"outer cannot have block \(16, 16\); allowed are 16"),
        ("nvfp4", {"rounding": "eden", "block": 8}, "eden' cannot have block 8; allowed are 16"),
        ("nvfp4", {"four_over_six": "mse", "block": 7}, r"block 7; allowed are 16, \(16, 16\)"),
        ("hif4", {"block": 32}, "block of hif4 cannot be 32; allowed are 64"),
        ("nvfp4", {"rounding": "eden", "tensor_scale": False}, "needs the tensor's scale"),
        ("nvfp4", {"shrink": 0.75}, "nvfp4 takes no shrink"),
        ("mxfp4", {"shrink": 0.1}, "from 0.5 to 1"),
        ("mxfp4", {"shrink": 0.75, "scale_mode": "std"}, "largest magnitude"),
        ("mxfp8", {"scale_mode": "std"}, "allowed are floor"),
        ("mxfp4", {"rounding": "eden"}, "allowed are even"),
    ):
        with pytest.raises(FormatError, match=says):
            qdq(x, fmt, **options)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [("mxfp4", {"shrink": 0.75}), ("nvfp4", {"outer": 128}), ("nvfp4", {"rounding": "eden"})],
)
def test_what_has_no_stored_form_is_not_encoded(fmt: str, options: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="use qdq"):
        encode(torch.ones(128), fmt, **options)


# hif4 ends at 7 * 49152.
@given(st.integers(-20, 14), st.integers(0, 2**31))
@settings(max_examples=20)
@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("hif4", {}),
        ("nvfp4", {"outer": 128}),
        ("nvfp4", {"four_over_six": "mse"}),
        ("mxfp4", {"shrink": 0.75}),
    ],
)
def test_a_power_of_two_scales_the_values_and_nothing_else(
    fmt: str, options: dict[str, Any], exponent: int, seed: int
) -> None:
    x = normal(2, 128, seed=seed).to(torch.bfloat16).float()

    assert torch.equal(qdq(x * 2.0**exponent, fmt, **options), qdq(x, fmt, **options) * 2.0**exponent)


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_what_hif4_holds_stays(seed: int) -> None:
    once = qdq(normal(4, 64, seed=seed), "hif4")
    twice = qdq(once, "hif4")

    # The second scale may be finer, where the largest value was rounded down.
    assert (twice - once).norm() <= 0.07 * once.norm()


@pytest.mark.parametrize("kind", ["normal", "mean", "tiny", "huge", "edges", "special"])
def test_the_fast_deviation_gives_the_scales_of_torchs(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(20_000, 32, generator=generator) * torch.randn(20_000, 1, generator=generator).exp()
    if kind == "mean":
        rows += torch.randn(20_000, 1, generator=generator).mul_(6).exp()
    elif kind == "tiny":
        rows *= torch.linspace(-150, 0, 20_000)[:, None].exp2()
    elif kind == "huge":
        rows *= torch.linspace(0, 127, 20_000)[:, None].exp2()
    elif kind == "edges":
        # Blocks whose wanted scale is a power of two, or a few steps beside it.
        sigma = rows.std(-1, correction=0, keepdim=True)
        steps = 1 + torch.randint(-40, 41, (20_000, 1), generator=generator) * 2**-23
        rows = rows / sigma / (2.92247856 / 6) * steps
    elif kind == "special":
        rows[::3, 5], rows[1::3, 7], rows[::5] = float("nan"), float("inf"), 0.0
    assert torch.equal(deviation._bytes(rows), deviation._exact_bytes(rows))
