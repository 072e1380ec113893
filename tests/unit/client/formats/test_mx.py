"""The MX formats against torchao, and where its versions differ against the specification in fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capd.formats import decode, encode, qdq
from tests.kit.formats.oracle import every_pattern, float_codebook, same_bits
from tests.kit.formats.packages import mx_through_torchao
from tests.kit.tiers import rows

CASES = [("mxfp8", "e4m3"), ("mxfp8", "e5m2"), ("mxfp6", "e2m3"), ("mxfp6", "e3m2"), ("mxfp4", "e2m1")]
MODES = ("floor", "ceil", "even", "rceil")


def ordinary_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 64 with magnitudes from 2**-70 to 2**70, ties, zeros, and every mantissa of bf16 as the largest one."""
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(1024, 64, generator=generator) * torch.ldexp(
        torch.ones(1024, 1), torch.randint(-70, 70, (1024, 1), generator=generator)
    )
    rows[:, 5] = 0.0
    rows[:, 6] = -0.0
    mantissas = 1 + torch.arange(128).repeat(4) / 128
    rows[:512] = (torch.randint(-16, 17, (512, 64), generator=generator) / 16) * mantissas[:, None]
    rows[:512, 0] = mantissas
    rows[:512, 32] = -mantissas * 2
    return rows.to(dtype)


@pytest.mark.parametrize(("fmt", "elem"), CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", rows([torch.bfloat16, torch.float32], [torch.bfloat16]))
def test_ordinary_blocks_are_torchaos(fmt: str, elem: str, mode: str, dtype: torch.dtype) -> None:
    rows = ordinary_rows(dtype)
    scale, values = mx_through_torchao(rows, elem, mode)

    found = encode(rows, fmt, elem=elem, scale_mode=mode)

    assert found.scale is not None
    assert torch.equal(found.scale, scale)
    assert same_bits(decode(found), values)
    assert same_bits(qdq(rows, fmt, elem=elem, scale_mode=mode).float(), values.to(dtype).float())


@pytest.mark.parametrize(("fmt", "elem"), CASES)
def test_every_bf16_value_beside_a_largest_one_is_torchaos(fmt: str, elem: str) -> None:
    values = every_pattern(torch.bfloat16)
    values = values[values.isfinite() & (values.abs() < 1.0) & (values.abs() > 2.0**-120)]
    values = values[: len(values) // 31 * 31].view(-1, 31)
    rows = torch.cat([torch.ones(len(values), 1, dtype=torch.bfloat16), values], dim=1)

    assert same_bits(decode(encode(rows, fmt, elem=elem)), mx_through_torchao(rows, elem, "floor")[1])


def scale_of(amax: Fraction, elem: str, mode: str) -> Fraction:
    """The scale of §6.3 and its variants, by exact comparison instead of logarithms."""
    book = float_codebook(elem)
    largest = book.magnitudes[-1]
    emax = math.frexp(float(largest))[1] - 1
    mantissa_bits = {"e4m3": 3, "e5m2": 2, "e3m2": 2, "e2m3": 3, "e2m1": 1}[elem]
    if amax == 0:
        return Fraction(2) ** -127
    exponent = -200
    while Fraction(2) ** (exponent + 1) <= amax:
        exponent += 1
    exact_power = Fraction(2) ** exponent == amax
    if mode == "even" and amax / Fraction(2) ** exponent >= 2 - Fraction(1, 2 ** (mantissa_bits + 1)):
        exponent += 1
    if mode == "ceil" and not exact_power:
        exponent += 1
    found = exponent - emax
    if mode == "rceil":
        found = -400
        while largest * Fraction(2) ** found < amax:
            found += 1
    return Fraction(2) ** max(-127, min(127, found))


@pytest.mark.parametrize(("fmt", "elem"), CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "largest", [2.0**-149, 2.0**-130, 2.0**-127, 1.75 * 2.0**-124, 1.5 * 2.0**-112, 1.7 * 2.0**127]
)
def test_the_smallest_and_largest_blocks_follow_the_specification(
    fmt: str, elem: str, mode: str, largest: float
) -> None:
    row = torch.tensor(
        [largest, -largest / 2, largest / 3, largest / 7, largest / 100, 0.0, -0.0] + [0.0] * 25
    )
    book = float_codebook(elem)
    scale = scale_of(Fraction(row.abs().max().item()), elem, mode)
    expected = []
    for value in row.tolist():
        exact = book.nearest(abs(Fraction(value)) / scale, "even") * scale
        expected.append(math.copysign(float(exact) if exact < Fraction(2) ** 128 else math.inf, value))

    found = encode(row[None], fmt, elem=elem, scale_mode=mode)

    assert found.scale is not None
    assert Fraction(2) ** (found.scale.item() - 127) == scale
    assert same_bits(decode(found)[0], torch.tensor(expected))


@pytest.mark.parametrize(("fmt", "elem"), CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_an_infinity_or_a_nan_is_nan_and_no_other_is(
    fmt: str, elem: str, mode: str, bad: float
) -> None:
    row = torch.linspace(-2, 2, 96)
    clean = qdq(row, fmt, elem=elem, scale_mode=mode)
    row[40] = bad

    found = encode(row, fmt, elem=elem, scale_mode=mode)

    assert found.scale is not None
    assert found.scale.tolist()[1] == 255
    assert decode(found)[32:64].isnan().all()
    assert same_bits(torch.cat([decode(found)[:32], decode(found)[64:]]), torch.cat([clean[:32], clean[64:]]))


def test_a_block_of_zeros_keeps_its_signs() -> None:
    row = torch.tensor([0.0, -0.0] * 16)

    found = encode(row, "mxfp4")

    assert found.scale is not None
    assert found.scale.tolist() == [0]
    assert same_bits(decode(found), row)


@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize(("fmt", "elem"), CASES)
def test_elements_are_the_nearest_fractions_of_their_scale(fmt: str, elem: str, rounding: str) -> None:
    row = ordinary_rows(torch.float32)[:40]
    book = float_codebook(elem)
    found = encode(row, fmt, elem=elem, rounding=rounding)
    assert found.scale is not None
    values = decode(found)
    for index, value in enumerate(row.flatten().tolist()):
        scale = Fraction(2) ** (found.scale.flatten()[index // 32].item() - 127)
        nearest = book.nearest(abs(Fraction(value)) / scale, rounding) * scale
        assert abs(Fraction(values.flatten()[index].item())) == nearest


BLOCKS = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
    min_size=1,
    max_size=70,
)
CASE = st.sampled_from(CASES)
MODE = st.sampled_from(MODES)


@given(BLOCKS, CASE, MODE, st.sampled_from([torch.float32, torch.bfloat16]))
def test_quantising_is_decoding_what_was_encoded(
    numbers: list[float], case: tuple[str, str], mode: str, dtype: torch.dtype
) -> None:
    values = torch.tensor(numbers).to(dtype)
    options: dict[str, Any] = {"elem": case[1], "scale_mode": mode}

    assert same_bits(
        qdq(values, case[0], **options).float(), decode(encode(values, case[0], **options)).to(dtype).float()
    )


@given(BLOCKS, CASE)
def test_what_lies_on_the_grid_stays_and_order_is_kept(numbers: list[float], case: tuple[str, str]) -> None:
    values = torch.tensor(sorted(numbers))[:32]

    found = qdq(values, case[0], elem=case[1])

    assert bool((found[1:] >= found[:-1]).all())
    assert same_bits(qdq(found, case[0], elem=case[1]), found)


@given(BLOCKS, CASE, st.sampled_from(["ceil", "rceil"]))
def test_the_error_is_half_a_step_at_most_where_nothing_saturates(
    numbers: list[float], case: tuple[str, str], mode: str
) -> None:
    values = torch.tensor(numbers)
    book = float_codebook(case[1])
    found = encode(values, case[0], elem=case[1], scale_mode=mode)
    assert found.scale is not None
    for index, (value, got) in enumerate(zip(numbers, decode(found).tolist(), strict=True)):
        scale = Fraction(2) ** (found.scale[index // 32].item() - 127)
        low, high = book.neighbours(abs(Fraction(value)) / scale)
        assert abs(Fraction(value) - Fraction(got)) <= (high - low) * scale / 2


@given(
    st.lists(st.floats(width=16, min_value=-100, max_value=100), min_size=32, max_size=32),
    CASE,
    MODE,
    st.integers(-40, 40),
)
def test_a_power_of_two_goes_through(
    numbers: list[float], case: tuple[str, str], mode: str, power: int
) -> None:
    values = torch.tensor(numbers)
    options: dict[str, Any] = {"elem": case[1], "scale_mode": mode}

    assert torch.equal(
        qdq(values * 2.0**power, case[0], **options), qdq(values, case[0], **options) * 2.0**power
    )
