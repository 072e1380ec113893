"""Blocks measured by counts: every number is the one that a pass over all values finds, and sums do not round."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.analyze.counting.counted_blocks import counted_blocks
from capd.analyze.distribution import distribution_of
from capd.analyze.errors import Errors, errors_of
from capd.analyze.exact import exact, rounded, weighted
from capd.analyze.format_choice import FormatChoice, choices
from capd.analyze.measure import measure_each
from capd.formats import decode, encode
from tests.kit.tiers import rows

FORMATS = (
    "mxfp8", "mxfp4", "nvfp4", "nvfp4:16x16", "mxfp4:axis=-2", "fp8:128:inf", "mxfp8:e5m2", "mxfp8:rceil", "mxfp8:ceil",
    "mxfp8:even", "mxfp8:away", "mxfp6", "mxfp6:e3m2:ceil", "mxfp4:even", "mxfp4:rceil", "mxfp4:away", "mxfp4:axis=0",
    "nvfp4:tensor_scale=no", "nvfp4:axis=-2", "nvfp4:away", "fp8:128", "fp8:128x128", "fp8:128:rceil",
    "fp8:128:unit:inf", "fp8:128:e5m2:inf",
)  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale


def every_pattern(dtype: torch.dtype, *, finite: bool) -> torch.Tensor:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(every.isfinite(), every, torch.zeros((), dtype=dtype)) if finite else every


def tensors(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Blocks of all kinds: whole and filled, of near and far values, of one value, with NaN and Inf."""
    shuffled = torch.randperm(65536, generator=torch.Generator().manual_seed(1))
    yield random(96, 256).to(dtype)
    yield random(37, 103).to(dtype)
    yield random(5, 40, 96).to(dtype)
    yield every_pattern(dtype, finite=False)[shuffled].view(256, 256)
    yield every_pattern(dtype, finite=True)[shuffled].view(256, 256)
    yield every_pattern(dtype, finite=True)[:65535].view(255, 257)
    yield random(64, 256, scale=1e-7 if dtype == torch.float16 else 1e-38).to(dtype)
    yield random(64, 256, scale=3e4 if dtype == torch.float16 else 1e38).to(dtype)
    yield torch.zeros(16, 256, dtype=dtype)
    yield torch.arange(-3, 4).repeat(64 * 37).view(64, 259)[:, :256].to(dtype)
    spread = random(64, 256) * torch.logspace(-6, 3, 256)
    spread[1, 0], spread[1, 1], spread[4, 5] = math.nan, math.inf, -math.inf
    yield spread.to(dtype)


COUNTS = (
    "records",
    "count",
    "nan",
    "inf",
    "lost",
    "underflows",
    "saturations",
    "flushes",
    "absmax",
    "max_abs",
    "blocks",
)


def numbers(found: Errors) -> dict[str, object]:
    """All numbers of some errors, with the sums as the nearest float64."""
    sums = {name: rounded(getattr(found.sums, name)) for name in type(found.sums).__slots__}
    return {**{name: getattr(found, name) for name in COUNTS}, **sums}


def numbers_by_values(x: torch.Tensor, choice: FormatChoice) -> dict[str, object]:
    """The same from every value: float32 is never counted, and math.fsum rounds once."""
    before = x.double().numpy()
    after = decode(encode(x, choice.fmt, **choice.options)).double().numpy()
    usable = np.isfinite(before) & np.isfinite(after)
    u, v = before[usable], after[usable]
    terms = {
        "x2": u * u,
        "y2": v * v,
        "xy": u * v,
        "d2": (v - u) ** 2,
        "abs_x": np.abs(u),
        "abs_d": np.abs(v - u),
    }
    sums = {name: math.fsum(of.tolist()) for name, of in terms.items()}
    return {**numbers(errors_of(x.float(), choice)), **sums}


@pytest.fixture(autouse=True)
def everything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capd.analyze.counting.counted_blocks.FEWEST_VALUES", 1)
    monkeypatch.setattr("capd.analyze.counting.counted_blocks.VALUES_PER_BIN", 0.02)


@pytest.mark.parametrize("text", rows(FORMATS, ["mxfp8", "mxfp4", "nvfp4", "nvfp4:16x16", "fp8:128:inf"]))
@pytest.mark.parametrize("dtype", rows(DTYPES, ["bfloat16"]))
def test_counts_give_to_the_bit_what_all_values_give(text: str, dtype: str) -> None:
    [choice], counted = choices(text), 0
    for x in tensors(DTYPES[dtype]):
        distribution = distribution_of(x.view(torch.int16).numpy().view(np.uint16), dtype)
        if not counted_blocks(x, distribution, [choice.spec]):
            continue
        counted += 1

        found, problems = measure_each(x, distribution, [choice])

        assert problems == []
        assert numbers(found[text]) == numbers_by_values(x, choice)
    assert counted >= 3


def test_formats_that_share_a_pass_are_measured_as_each_alone() -> None:
    x = random(200, 300).to(torch.bfloat16)
    distribution = distribution_of(x.view(torch.int16).numpy().view(np.uint16), "bfloat16")
    chosen = choices(
        "mxfp8,mxfp4,mxfp8:e5m2,mxfp4:even,nvfp4,nvfp4:axis=-2,hifp8,mxfp8:legacy,mxfp4:stochastic"
    )

    together, _ = measure_each(x, distribution, chosen)

    assert together == {one.label: measure_each(x, distribution, [one])[0][one.label] for one in chosen}
    assert {one.label for one in chosen if one.spec in counted_blocks(x, distribution, [one.spec])} == {
        "mxfp8", "mxfp4", "mxfp8:e5m2", "mxfp4:even", "nvfp4", "nvfp4:axis=-2",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_values_are_not_counted(dtype: torch.dtype) -> None:
    x = random(32, 64).to(dtype)

    assert counted_blocks(x, distribution_of(x.numpy(), str(dtype)[6:]), [choices("mxfp8")[0].spec]) == {}


SOME = st.lists(st.tuples(st.floats(-2, 2, exclude_min=True), st.integers(0, 1 << 20)), max_size=40)


@given(SOME, st.sampled_from([0, -1070, -600, 400, 1000]), st.sampled_from([1, 1 << 20]))
@settings(deadline=None)
def test_weighted_sums_do_not_round(pairs: list[tuple[float, int]], exponent: int, times: int) -> None:
    values = np.array([math.ldexp(value, exponent) for value, _ in pairs])
    counts = np.array([count * times for _, count in pairs], np.int64)

    assert weighted(values, counts) == sum(
        exact(value) * int(count) for value, count in zip(values, counts, strict=True)
    )
