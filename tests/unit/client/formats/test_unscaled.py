"""bf16 and fp16 against ml_dtypes and numpy, which round in one step."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from capd.formats import decode, encode, qdq
from tests.kit.formats.oracle import Codebook, around, every_pattern, float_codebook, same_bits, ties

NUMPY_TYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def interesting(fmt: str) -> torch.Tensor:
    """float32: values of the format with neighbours and ties, and patterns from everywhere."""
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator).to(torch.int32)
    exact = every_pattern(TORCH_TYPES[fmt]).float()
    bits = exact.view(torch.int32)
    halfway = [
        (bits + offset).view(torch.float32)
        for offset in (0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 1, -1)
    ]
    return torch.cat([patterns.view(torch.float32), exact, *halfway])


@pytest.mark.parametrize("fmt", NUMPY_TYPES)
def test_rounding_float32_is_the_packages(fmt: str) -> None:
    values = interesting(fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = torch.from_numpy(values.numpy().astype(NUMPY_TYPES[fmt]).astype(np.float32))

    assert same_bits(qdq(values, fmt), expected)
    assert same_bits(decode(encode(values, fmt)), expected)


@pytest.mark.parametrize("fmt", NUMPY_TYPES)
def test_saturating_differs_where_the_result_is_infinite(fmt: str) -> None:
    values = interesting(fmt)
    largest = torch.finfo(TORCH_TYPES[fmt]).max

    plain, found = qdq(values, fmt), qdq(values, fmt, overflow="saturate")

    assert same_bits(
        found, torch.where(plain.isinf(), torch.full_like(plain, largest).copysign(plain), plain)
    )


@pytest.mark.parametrize("fmt", NUMPY_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_rounded_as_its_float32(fmt: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    expected = qdq(values.float(), fmt)

    assert same_bits(qdq(values, fmt).float(), expected.to(dtype).float())
    assert same_bits(decode(encode(values, fmt)), expected)
    payload = encode(values, fmt).payload
    assert payload.dtype == torch.uint16
    assert payload.shape == values.shape


@pytest.mark.parametrize("rounding", ["even", "away"])
def test_fp16_is_rounded_to_the_nearest_fraction(rounding: str) -> None:
    book = float_codebook("fp16")
    ends = Codebook(book.magnitudes[:64]), Codebook(book.magnitudes[-64:])
    values = around([point for end in ends for point in ties(end) if point < 65520])
    values = values[values.abs() < 65520]  # from there on Inf is nearest
    expected = [float(book.nearest(abs(Fraction(value)), rounding)) for value in values.tolist()]

    assert same_bits(qdq(values, "fp16", rounding=rounding).abs(), torch.tensor(expected))


def test_bf16_ties_go_away_where_asked() -> None:
    even_below, odd_below = 1.0 + 2.0**-8, 1.0 + 2.0**-7 + 2.0**-8
    values = torch.tensor([even_below, odd_below, -even_below, even_below - 2.0**-23])

    found = qdq(values, "bf16", rounding="away")

    assert found.tolist() == [1.0 + 2.0**-7, 1.0 + 2.0**-6, -1.0 - 2.0**-7, 1.0]


@pytest.mark.parametrize("fmt", NUMPY_TYPES)
def test_stochastic_rounding_is_unbiased(fmt: str) -> None:
    step = 2.0**-7 if fmt == "bf16" else 2.0**-10
    values = torch.full((40_000,), 1.0 + 0.3 * step)

    found = qdq(values, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(1))

    assert set(found.tolist()) == {1.0, 1.0 + step}
    assert abs((found > 1.0).double().mean().item() - 0.3) < 0.015
