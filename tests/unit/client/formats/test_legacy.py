"""The preset `legacy` against tensor_saver's rules, told in exact fractions, and its marks in bf16 arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from capd.formats import decode, encode, qdq
from tests.kit.formats.oracle import every_pattern, float_codebook, same_bits

CASES = [("mxfp8", "e4m3"), ("mxfp8", "e5m2"), ("mxfp6", "e3m2"), ("mxfp6", "e2m3"), ("mxfp4", "e2m1")]


@pytest.mark.parametrize(("fmt", "elem"), CASES)
@pytest.mark.parametrize("block", [32, 16])
def test_blocks_have_the_floor_scale_and_ties_go_away(fmt: str, elem: str, block: int) -> None:
    """In float32, on values that are not within a rounding of log2 of a power of two."""
    book = float_codebook(elem)
    emax = math.frexp(float(book.magnitudes[-1]))[1] - 1
    values = torch.randint(-31, 32, (24, 64), generator=torch.Generator().manual_seed(1)) / 16.0
    expected = []
    for row in values.view(-1, block).tolist():
        amax = max(map(abs, row))
        exponent = (math.frexp(amax)[1] - 1 if amax else -126) - emax
        scale = Fraction(2) ** max(exponent, -127)
        expected += [
            math.copysign(float(book.nearest(abs(Fraction(x)) / scale, "away") * scale), x) for x in row
        ]

    found = qdq(values, fmt, elem=elem, block=block, preset="legacy")

    assert torch.equal(found, torch.tensor(expected).view(24, 64))


def test_mxfp8_is_e5m2_unless_told_otherwise() -> None:
    values = torch.randn(8, 64)

    assert torch.equal(
        qdq(values, "mxfp8", preset="legacy"), qdq(values, "mxfp8", elem="e5m2", preset="legacy")
    )
    assert encode(values, "mxfp8", preset="legacy").elem == "e5m2"


def test_arithmetic_in_bf16_shows() -> None:
    """log2 of 255/128 * 2**20 is 21 in bf16, so the scale is twice what the format has, and small values are lost."""
    row = torch.zeros(32)
    row[0], row[1] = 255 / 128 * 2.0**20, 2.0**18 * 1.25

    in_bf16 = encode(row.to(torch.bfloat16), "mxfp4", preset="legacy")
    in_float32 = encode(row, "mxfp4", preset="legacy")

    assert in_bf16.scale is not None
    assert in_float32.scale is not None
    assert (in_bf16.scale.item(), in_float32.scale.item()) == (127 + 19, 127 + 18)
    assert decode(in_bf16)[:2].tolist() == [2.0**21, 2.0**18]
    assert decode(in_float32)[:2].tolist() == [6 * 2.0**18, 1.5 * 2.0**18]


def test_a_tie_of_one_half_is_lost_to_bf16_additions() -> None:
    """127/256 steps plus a half is 1 in bf16: what is just below half of the smallest value becomes that value."""
    row = torch.zeros(32)
    row[0], row[1] = 4.0, 0.5 * 255 / 512
    assert qdq(row.to(torch.bfloat16), "mxfp4", preset="legacy")[1] == 0.5
    assert qdq(row, "mxfp4", preset="legacy")[1] == 0.0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_a_block_with_an_infinity_or_a_nan_is_nan(fmt: str, bad: float) -> None:
    values = torch.ones(64)
    values[40] = bad

    found = qdq(values, fmt, preset="legacy")

    assert found[:32].eq(1).all()
    assert found[32:].isnan().all()


def test_hifp8_differs_from_the_format_where_it_clamps_and_nowhere_else() -> None:
    """Counted once with tensor_saver's own function, over all values of bf16."""
    values = every_pattern(torch.bfloat16)
    finite = values.isfinite()
    right, found = qdq(values, "hifp8").float(), qdq(values, "hifp8", preset="legacy").float()
    small = finite & (values != 0) & (values.abs() < 2.0**-23)
    large = finite & (values.abs() >= 40960)

    assert (int(small.sum()), int(large.sum())) == (26622, 28864)
    assert torch.equal(found[small], torch.full_like(found[small], 2.0**-22).copysign(values[small].float()))
    assert torch.equal(found[large], torch.full_like(found[large], 32768.0).copysign(values[large].float()))
    between = finite & ~small & ~large
    assert torch.equal(found[between], right[between])
    assert found[values.isinf()].abs().eq(32768).all()
    assert found[values.isnan()].isnan().all()


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp6", "mxfp4", "hifp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_encoded_decodes_to_what_was_quantised(fmt: str, dtype: torch.dtype) -> None:
    values = (torch.randn(30, 70, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 70)).to(
        dtype
    )
    values[3] = 0.0

    found = decode(encode(values, fmt, preset="legacy"))

    assert same_bits(qdq(values, fmt, preset="legacy").float() + 0.0, found.to(dtype).float() + 0.0)
