"""HiFloat8 against en_dtypes (all 16-bit values, float32 ties), against fractions, and hybrid rounding bit by bit."""

from __future__ import annotations

import math
from fractions import Fraction

import en_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capd.formats import decode, encode, qdq
from tests.kit.formats.oracle import around, every_pattern, hif8_codebook, hif8_magnitudes, same_bits, ties

BOOK = hif8_codebook()
OVERFLOW = 1.25 * 2**15


def package_codes(values: torch.Tensor) -> torch.Tensor:
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(values.float().numpy().astype(en_dtypes.hifloat8).view(np.uint8))


def magnitudes_around() -> torch.Tensor:
    return around([*ties(BOOK), 2.0**-23, 2.0**-24, OVERFLOW, 2.0**16, 2.0**100, 2.0**-149])


def test_every_code_decodes_as_in_the_package_and_as_its_fields_say() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    encoded = encode(torch.zeros(256), "hifp8")
    found = decode(type(encoded)(codes, None, None, "hifp8"))

    assert same_bits(found, torch.from_numpy(codes.numpy().view(en_dtypes.hifloat8).astype(np.float32)))
    for code, magnitude in hif8_magnitudes().items():
        assert Fraction(found[code].item()) == magnitude
    assert found[0x6F] == torch.inf
    assert len(set(found[found.isfinite()].tolist())) == 253


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_encoded_as_in_the_package(dtype: torch.dtype) -> None:
    values = every_pattern(dtype)

    assert torch.equal(encode(values, "hifp8").payload, package_codes(values))


def test_ties_and_their_neighbours_in_float32_are_encoded_as_in_the_package() -> None:
    generator = torch.Generator().manual_seed(4)
    patterns = torch.randint(-(1 << 31), 1 << 31, (300_000,), generator=generator).to(torch.int32)
    extreme = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45])
    values = torch.cat([magnitudes_around(), patterns.view(torch.float32), extreme])

    assert torch.equal(encode(values, "hifp8").payload, package_codes(values))


def test_rounding_is_to_the_nearest_fraction_ties_away() -> None:
    values = magnitudes_around()
    values = values[values.abs() < OVERFLOW]
    expected = []
    for value in values.tolist():
        nearest = float(BOOK.nearest(abs(Fraction(value)), "away"))
        expected.append(math.copysign(nearest, value) if nearest else 0.0)  # there is no -0

    assert same_bits(qdq(values, "hifp8"), torch.tensor(expected))


def test_saturating_keeps_the_largest_value() -> None:
    values = torch.tensor([40959.996, OVERFLOW, -1e30, torch.inf, -torch.inf, torch.nan])

    assert qdq(values, "hifp8")[:5].tolist() == [32768.0, torch.inf, -torch.inf, torch.inf, -torch.inf]
    found = qdq(values, "hifp8", overflow="saturate")
    assert found[:5].tolist() == [32768.0, 32768.0, -32768.0, 32768.0, -32768.0]
    assert found[5].isnan()
    assert encode(values, "hifp8", overflow="saturate").payload.tolist() == [
        0x6E,
        0x6E,
        0xEE,
        0x6E,
        0xEE,
        0x80,
    ]


def hybrid(value: float, width: int, lowest_bit: int) -> float:
    """Hybrid rounding of a positive value as text of its bits; `width` of the source's mantissa, 23 for float32."""
    exponent = math.frexp(value)[1] - 1
    if value >= OVERFLOW:
        return math.inf
    if abs(exponent) < 4 or exponent < -23:
        return float(BOOK.nearest(Fraction(value), "away"))
    fraction = f"{int((Fraction(value) / Fraction(2) ** exponent - 1) * 2**width):0{width}b}"
    if exponent == -23:
        low, high, discarded = 0.0, 2.0**-22, "1" + fraction
    else:
        kept = 2 if abs(exponent) <= 7 else 1 if abs(exponent) <= 15 else 0
        discarded = fraction[kept:]
        step = 2.0 ** (exponent - kept)
        low = 2.0**exponent + int("0" + fraction[:kept], 2) * step
        high = low + step
        if "1" not in discarded:
            return low
    if width == 23:
        is_up = int(discarded[:14], 2) >= int(fraction[-14:], 2)
    else:
        is_up = int(discarded[:2], 2) >= 2 * lowest_bit + 1
    found = high if is_up else low
    return math.inf if found > 32768 else found


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 10), (torch.bfloat16, 7)])
def test_hybrid_rounding_of_every_16_bit_value(dtype: torch.dtype, width: int) -> None:
    values = every_pattern(dtype)
    values = values[values.isfinite() & (values > 0)]
    expected = [
        hybrid(value, width, pattern & 1)
        for value, pattern in zip(values.tolist(), values.view(torch.int16).tolist(), strict=True)
    ]

    assert same_bits(decode(encode(values, "hifp8", rounding="hybrid")), torch.tensor(expected))
    assert same_bits(decode(encode(-values, "hifp8", rounding="hybrid")), -torch.tensor(expected) + 0.0)


def test_hybrid_rounding_of_float32() -> None:
    generator = torch.Generator().manual_seed(6)
    exponents = torch.randint(-25, 17, (60_000,), generator=generator)
    values = torch.ldexp(1 + torch.rand(60_000, generator=generator), exponents)
    values = torch.cat([values, magnitudes_around().abs()])
    values = values[(values > 0) & values.isfinite()]
    expected = [hybrid(value, 23, 0) for value in values.tolist()]

    assert same_bits(qdq(values, "hifp8", rounding="hybrid"), torch.tensor(expected))


def test_stochastic_rounding_is_unbiased_and_reaches_below_the_smallest_value() -> None:
    generator = torch.Generator().manual_seed(7)
    for value, low, high in ((17.0, 16.0, 20.0), (0.3 * 2**-22, 0.0, 2.0**-22), (1.03, 1.0, 1.125)):
        found = qdq(torch.full((40_000,), value), "hifp8", rounding="stochastic", generator=generator)
        assert set(found.tolist()) == {low, high}
        assert abs((found == high).double().mean().item() - (value - low) / (high - low)) < 0.015


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40))
def test_order_is_kept_and_values_of_the_format_stay(numbers: list[float]) -> None:
    values = torch.tensor(sorted(numbers))

    found = qdq(values, "hifp8")

    assert bool((found[1:] >= found[:-1]).all())
    assert same_bits(qdq(found, "hifp8"), found)
    assert same_bits(qdq(found, "hifp8", rounding="hybrid"), found)
