"""Sums of rows: estimates are near the sums in full, and cancellation and special values give no alarm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from capd.check.factors import factor_names
from capd.check.judging import ProductJudgement, ProductLimits, judged
from capd.check.precision import precision_of
from capd.check.residual import Product, row_sums_of

BFLOAT16 = precision_of(["bfloat16"])
FLOAT32 = precision_of(["float32"])


def operands(rows: int = 300, terms: int = 256, columns: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, terms, generator=generator).bfloat16()
    return a, torch.randn(terms, columns, generator=generator).bfloat16()


def judge(a: Tensor, b: Tensor, c: Tensor, **more: bool) -> ProductJudgement:
    assert BFLOAT16 is not None
    product = Product(a, b, c, torch.float32, torch.bfloat16)
    return judged(product, BFLOAT16, ProductLimits(), **more)


def rounded(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).bfloat16()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_estimates_are_near_the_sums_in_full(turned: bool, offset: bool) -> None:
    a, b = operands()
    bias = torch.linspace(-3, 3, b.shape[1]) if offset else None
    c = ((a.double() @ b.double()) * 1.3 + (0 if bias is None else bias)).bfloat16()
    product = Product(a, b, c, torch.float32, torch.bfloat16, bias)
    product = product.turned if turned else product
    exact, estimate = row_sums_of(product, in_full=True), row_sums_of(product, in_full=False)
    truth = (product.a.double() @ product.b.double()).sub(product.c.double())
    if bias is not None:
        truth += bias[:, None] if turned else bias
    assert torch.allclose(exact.d2, truth.square().sum(1), rtol=1e-3)
    assert not torch.equal(exact.d2, estimate.d2)
    assert float(estimate.d2.sum() / exact.d2.sum()) == pytest.approx(1, abs=0.1)
    assert torch.equal(exact.s2, estimate.s2)


def test_a_rounded_product_is_within_half_an_eps() -> None:
    found = judge(*operands(), rounded(*operands()))
    assert not found.is_beyond
    assert 0.3 < found.error < 0.6


def test_one_percent_is_beyond_the_limit_and_the_factor_fits() -> None:
    a, b = operands()
    found = judge(a, b, (rounded(a, b).float() * 1.01).bfloat16())
    assert found.is_beyond
    assert found.alpha == pytest.approx(1.01, abs=1e-3)
    assert found.rest is not None
    assert found.rest < 1


def test_one_row_and_one_column_are_named() -> None:
    a, b = operands()
    c = rounded(a, b)
    c[17] = c[18]
    found = judge(a, b, c)
    assert (found.rows.first, found.rows.beyond) == ((17,), 1)
    c = rounded(a, b)
    c[:, 5] = 0
    found = judge(a, b, c)
    assert (found.columns.first, found.columns.beyond) == ((5,), 1)


def test_terms_that_cancel_are_the_scale_of_a_small_result() -> None:
    a, b = operands()
    # The rows of the product are rounding alone: their terms cancel.
    a, b = torch.cat([a, a], 1), torch.cat([b, -b])
    noise = torch.randn(a.shape[0], b.shape[1], generator=torch.Generator().manual_seed(1)) * 16 * 2.0**-8
    assert not judge(a, b, noise.bfloat16()).is_beyond
    assert judge(a, b, (noise * 10).bfloat16()).is_beyond


def test_rows_of_zeros_hold_and_a_value_in_them_does_not() -> None:
    a, b = operands()
    a[3] = 0
    c = rounded(a, b)
    assert not judge(a, b, c).is_beyond
    c[3, 0] = 1e-3
    assert judge(a, b, c).rows.first == (3,)


def test_nan_in_the_product_alone_is_named_and_nan_of_an_operand_is_not() -> None:
    a, b = operands()
    c = rounded(a, b)
    c[9, 9] = math.nan
    assert judge(a, b, c).rows.first == (9,)
    a[4, 4] = math.inf
    assert not judge(a, b, rounded(a, b)).is_beyond


def test_a_bias_is_fitted_where_there_may_be_one() -> None:
    a, b = operands()
    bias = torch.linspace(-20, 20, b.shape[1])
    c = (a.double() @ b.double() + bias).bfloat16()
    found = judge(a, b, c, may_have_bias=True)
    assert (found.is_beyond, found.has_bias) == (False, True)
    assert judge(a, b, c).is_beyond
    assert judge(a, b, (c.float() * 1.05).bfloat16(), may_have_bias=True).alpha == pytest.approx(
        1.05, abs=1e-3
    )


SCALES = [(1e-30, 1.0), (1e30, 1.0), (1e30, 1e-30), (1e-20, 1e-15), (1e18, 1e18)]
"""Scales of operands whose squares, or those of their product, underflow or overflow in float32."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("of_a", "of_b"), SCALES)
def test_tiny_and_huge_values_are_judged_as_others(dtype: str, of_a: float, of_b: float) -> None:
    precision, kind = precision_of([dtype]), getattr(torch, dtype)
    assert precision is not None
    a, b = (one.float() for one in operands())
    a, b = (a * of_a).to(kind), (b * of_b).to(kind)
    truth = a.double() @ b.double()

    def of(c: Tensor) -> ProductJudgement:
        return judged(
            Product(a, b, c.to(kind), precision.computed_in, precision.cast), precision, ProductLimits()
        )

    sound, wrong = of(truth), of(truth * 1.05)
    assert not sound.is_beyond
    assert sound.error > 0
    assert (wrong.is_beyond, wrong.rows.beyond) == (True, len(a))
    assert wrong.alpha == pytest.approx(1.05, abs=1e-3)
    assert wrong.rest is not None
    assert wrong.rest < 1


@pytest.mark.parametrize(("of_a", "of_b"), SCALES)
def test_tiny_and_huge_terms_that_cancel_are_the_scale(of_a: float, of_b: float) -> None:
    a, b = (one.float() for one in operands())
    a, b = (torch.cat([a, a], 1) * of_a).bfloat16(), (torch.cat([b, -b]) * of_b).bfloat16()
    noise = torch.randn(a.shape[0], b.shape[1], generator=torch.Generator().manual_seed(1)).double()
    noise *= 16 * of_a * of_b * 2.0**-8
    assert not judge(a, b, noise.bfloat16()).is_beyond
    assert judge(a, b, (noise * 10).bfloat16()).is_beyond


def test_gradients_of_float16_that_overflow_are_sound_and_an_inf_elsewhere_is_not() -> None:
    precision = precision_of(["float16"])
    assert precision is not None
    a, b = (one.half() for one in operands())
    a[:, 0], b[0] = 60_000.0, torch.linspace(0.5, 1.4, b.shape[1]).half()
    c = (a.double() @ b.double()).half()
    assert 0 < int(c.isinf().sum()) < c.numel()

    def of(c: Tensor) -> ProductJudgement:
        return judged(Product(a, b, c, torch.float32, torch.float16), precision, ProductLimits())

    assert not of(c).is_beyond
    assert of(c).error > 0
    wrong = of(torch.where(c.isinf(), c, c.float() * 1.05).half())
    assert wrong.is_beyond
    assert wrong.alpha == pytest.approx(1.05, abs=2e-3)
    for value in (math.inf, -math.inf, math.nan):
        other = c.clone()
        # The sum in the first column is half of the largest number, that in the last one overflows.
        other[9, 0 if value > 0 else -1] = value
        assert of(other).rows.first == (9,)


def test_numbers_that_a_kernel_flushes_to_zero_give_no_alarm() -> None:
    a, b = (one.float() for one in operands())
    a, b = (a * 1e-25).bfloat16(), (b * 1e-15).bfloat16()
    c = rounded(a, b)
    assert 0 < float(c.abs().max()) < torch.finfo(torch.bfloat16).tiny
    assert not judge(a, b, torch.zeros_like(c)).is_beyond


def test_float32_is_judged_by_its_own_eps_and_then_as_tf32() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(64, 512, generator=generator), torch.randn(512, 64, generator=generator)
    assert FLOAT32 is not None

    def of(c: Tensor) -> ProductJudgement:
        return judged(Product(a, b, c, torch.float64, torch.float32), FLOAT32, ProductLimits())

    assert of(a @ b).precision == "float32"
    rough = a.half().float() @ b.half().float()
    assert (of(rough).precision, of(rough).is_beyond) == ("tf32", False)
    assert of(rough * 1.01).is_beyond


def test_mixed_precisions() -> None:
    mixed = precision_of(["float32", "bfloat16"])
    assert mixed is not None
    assert mixed.name == "bfloat16"
    assert precision_of(["float16", "bfloat16"]) is None
    assert precision_of(["uint8", "bfloat16"]) is None


def test_factors_are_named_by_the_sizes_of_the_layout() -> None:
    sizes = {"tp_size": 2, "dp_size": 4, "pp_size": 1, "micro_batches": 3}
    assert factor_names(2.0005, sizes) == ["tp_size"]
    assert factor_names(0.25, sizes) == ["1/dp_size"]
    assert factor_names(1 / 12, sizes) == ["1/(dp_size · micro_batches)"]
    assert factor_names(8.0, sizes) == ["tp_size · dp_size"]
    assert factor_names(1.9, sizes) == []
