"""FP8's elements, unscaled: decode tables, and casts of every bf16 and fp16 value, against ml_dtypes and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from capd.formats import decode, encode, qdq
from capd_client.formats.elements import ELEMENTS, codes_of, decode_table
from tests.kit.formats.oracle import LAYOUTS, around, every_pattern, float_codebook, same_bits, ties

PACKAGE_TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
FP8 = ("e4m3", "e5m2")


def through_package(values: torch.Tensor, elem: str) -> torch.Tensor:
    """Float32 values cast by ml_dtypes, which does not saturate, and back."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.numpy().astype(PACKAGE_TYPES[elem])
    return torch.from_numpy(cast.astype(np.float32))


def saturated(values: torch.Tensor, elem: str) -> torch.Tensor:
    largest = float(LAYOUTS[elem][3])
    return through_package(values.clamp(-largest, largest), elem)


@pytest.mark.parametrize("elem", PACKAGE_TYPES)
def test_every_code_decodes_as_in_the_package(elem: str) -> None:
    element = ELEMENTS[elem]
    count = 2 * element.sign_code
    expected = np.arange(count, dtype=np.uint8).view(PACKAGE_TYPES[elem]).astype(np.float32)

    assert same_bits(decode_table(element, torch.device("cpu")), torch.from_numpy(expected))


@pytest.mark.parametrize("elem", PACKAGE_TYPES)
def test_every_value_has_the_code_that_it_was_decoded_from(elem: str) -> None:
    element = ELEMENTS[elem]
    values = decode_table(element, torch.device("cpu"))
    codes = torch.arange(len(values), dtype=torch.uint8)

    found = codes_of(values, element)

    held = ~values.isnan()
    assert torch.equal(found[held], codes[held])
    assert set(found[~held].tolist()) <= {element.nan}


@pytest.mark.parametrize("elem", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overflow", ["saturate", "inf"])
def test_a_plain_cast_of_every_16_bit_value_is_the_packages(
    elem: str, dtype: torch.dtype, overflow: str
) -> None:
    values = every_pattern(dtype)
    expected = (saturated if overflow == "saturate" else through_package)(values.float(), elem)

    found = decode(encode(values, "fp8", elem=elem, scale_mode="unit", overflow=overflow))

    assert same_bits(found, expected)
    assert same_bits(
        qdq(values, "fp8", elem=elem, scale_mode="unit", overflow=overflow).float(),
        expected.to(dtype).float(),
    )


@pytest.mark.parametrize("elem", FP8)
def test_ties_and_their_neighbours_in_float32_are_the_packages(elem: str) -> None:
    values = around(ties(float_codebook(elem)))
    extreme = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([values, extreme])

    assert same_bits(decode(encode(values, "fp8", elem=elem, scale_mode="unit")), saturated(values, elem))
    assert same_bits(
        decode(encode(values, "fp8", elem=elem, scale_mode="unit", overflow="inf")),
        through_package(values, elem),
    )


@pytest.mark.parametrize("elem", FP8)
@pytest.mark.parametrize("rounding", ["even", "away"])
def test_rounding_is_to_the_nearest_fraction(elem: str, rounding: str) -> None:
    book = float_codebook(elem)
    values = torch.cat(
        [around(ties(book)), torch.randn(4096, generator=torch.Generator().manual_seed(2)) * 9]
    )
    expected = [
        math.copysign(float(book.nearest(abs(Fraction(value)), rounding)), value) for value in values.tolist()
    ]

    found = qdq(values, "fp8", elem=elem, scale_mode="unit", rounding=rounding)

    assert same_bits(found, torch.tensor(expected))


@pytest.mark.parametrize(
    ("fmt", "elem"), [("mxfp8", "e4m3"), ("mxfp6", "e2m3"), ("mxfp6", "e3m2"), ("mxfp4", "e2m1")]
)
def test_stochastic_rounding_takes_neighbours_in_proportion(fmt: str, elem: str) -> None:
    book = float_codebook(elem)
    largest = float(book.magnitudes[-1])
    points = [0.3 * float(book.magnitudes[1]), 1.1, 1.25, largest * 0.49]
    draws = 20_000
    generator = torch.Generator().manual_seed(5)
    for point in points:
        row = torch.full((draws, 32), point)
        row[:, 0] = 2.0 ** math.floor(math.log2(largest))  # a scale of one
        found = qdq(row, fmt, elem=elem, rounding="stochastic", generator=generator)[:, 1]
        low, high = map(float, book.neighbours(Fraction(point)))
        share = 0.0 if high == low else (point - low) / (high - low)
        assert set(found.tolist()) <= {low, high}
        assert abs(found.mean().item() - (low + share * (high - low))) <= 5 * (high - low) * 0.5 / math.sqrt(
            draws
        )


def test_a_generator_makes_stochastic_rounding_repeatable_and_leaves_torchs_own_alone() -> None:
    values = torch.randn(64, 64)
    before = torch.get_rng_state()

    first, second = (
        qdq(values, "mxfp4", rounding="stochastic", generator=torch.Generator().manual_seed(9))
        for _ in range(2)
    )

    assert torch.equal(first, second)
    assert not torch.equal(first, qdq(values, "mxfp4"))
    assert torch.equal(before, torch.get_rng_state())
