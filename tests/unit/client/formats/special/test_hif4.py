"""HiFloat4, against the formula of its published reference."""

from __future__ import annotations

import math

import pytest
import torch

from capd_client.formats import decode, encode, qdq
from capd_client.formats.spec import spec_of
from tests.kit.formats.references import bf16_reference, reference


def test_values_equal_those_of_the_reference() -> None:
    x, expected = bf16_reference("hif4_input"), reference("hif4_values")

    found = qdq(x.float(), "hif4")

    assert torch.equal(found, expected)
    assert torch.equal(decode(encode(x, "hif4")), expected)


@pytest.mark.parametrize("sigma", [1.0, 1e-3, 1e-5, 1e-8])
def test_the_error_on_normal_values_does_not_depend_on_their_size(sigma: float) -> None:
    x = (
        torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
        .mul_(sigma)
        .to(torch.bfloat16)
        .double()
    )

    noise = qdq(x, "hif4") - x

    # The format's paper plots 21.6 dB.
    assert 10 * math.log10(float(x.square().sum() / noise.square().sum())) == pytest.approx(21.6, abs=0.15)


def test_largest_smallest_and_invalid_values() -> None:
    x = torch.zeros(4, 64)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 1e30, 2.0**-60, torch.nan, -torch.inf

    found = qdq(x, "hif4")

    assert found[0, 0] == 7 * 49152
    assert found[1, 0] == 0
    assert found[2].isnan().all()
    assert found[3].isnan().all()
    assert torch.equal(decode(encode(x, "hif4")).isnan(), found.isnan())


def test_a_group_that_the_tensor_ends_within_is_filled_and_cropped() -> None:
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))

    found, encoded = qdq(x, "hif4"), encode(x, "hif4")

    assert encoded.payload.shape == (3, 100)
    assert encoded.scale is not None
    assert encoded.scale.shape == (3, 2)
    assert torch.equal(found[:, :64], qdq(x[:, :64], "hif4"))
    assert torch.equal(qdq(x.t(), "hif4", axis=0).t(), found)


def test_stochastic_rounding_is_unbiased_where_nothing_is_cut() -> None:
    # The largest magnitude is 7, so the scale and its reciprocal are 1. Eight values have both exponents, 56 have none.
    x = torch.cat([torch.tensor([7.0, 0.3, 2.5, -6.4, 5.5, 4.7, -3.1, 1.2]), torch.linspace(-1.7, 1.7, 56)])
    x = x.to(torch.bfloat16).float()
    draws, generator = 10_000, torch.Generator().manual_seed(3)

    found = qdq(x.expand(draws, 64).contiguous(), "hif4", rounding="stochastic", generator=generator).double()

    error = (found.mean(0) - x).abs()
    assert (error <= 4 * found.std(0) / math.sqrt(draws) + 1e-12).all()
    assert set(found[:, 2].tolist()) == {2.0, 3.0}


def test_a_value_takes_four_and_a_half_bits() -> None:
    assert spec_of("hif4", {}).bits_per_value == 4.5
