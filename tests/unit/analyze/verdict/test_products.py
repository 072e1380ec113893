"""The products of quantised operands, against torch on what `capd.formats` gives: each along the axis of its sum."""

from __future__ import annotations

import math

import pytest
import torch

from capd.analyze.format_choice import choices
from capd.analyze.verdict.products import MOST_ROWS, PRODUCTS, Operands, product_errors
from capd.formats import qdq


@pytest.fixture(scope="module")
def operands() -> Operands:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        spread = torch.exp(torch.randn(shape, generator=generator))
        return (torch.randn(shape, generator=generator) * spread * scale).bfloat16()

    return Operands(normal(60, 96), normal(40, 96, scale=0.02), normal(60, 40, scale=1e-5))


def sqnr(exact: torch.Tensor, found: torch.Tensor) -> float:
    x, y = exact.double(), found.double()
    return 10 * math.log10(float(x.square().sum() / (x - y).square().sum()))


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "fp8", "hifp8"])
def test_each_product_is_that_of_operands_quantised_along_its_sum(operands: Operands, fmt: str) -> None:
    x, w, dy = (one.float() for one in (operands.x, operands.weight, operands.dy))
    has_blocks = fmt in ("mxfp8", "nvfp4")

    def along(values: torch.Tensor, axis: int) -> torch.Tensor:
        return qdq(values, fmt, axis=axis) if has_blocks else qdq(values, fmt)

    found = product_errors(operands, choices(fmt))[fmt]

    assert set(found) == set(PRODUCTS)
    expected = {
        "Y": sqnr(x @ w.T, along(x, 1) @ along(w, 1).T),
        "dX": sqnr(dy @ w, along(dy, 1) @ along(w, 0)),
        "dW": sqnr(dy.T @ x, along(dy, 0).T @ along(x, 0)),
    }
    for name, value in expected.items():
        assert found[name].sqnr_db == pytest.approx(value, rel=1e-4), name


def test_a_large_product_is_computed_in_some_of_its_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((640, 32), (16, 32), (640, 16)))

    found = product_errors(Operands(x, w, dy), choices("fp8"))["fp8"]

    assert (found["Y"].count, found["dW"].count) == (MOST_ROWS * 16, 16 * 32)
    some = x[::10] @ w.T
    assert found["Y"].sqnr_db == pytest.approx(sqnr(some, (qdq(x, "fp8") @ qdq(w, "fp8").T)[::10]), rel=1e-4)


def test_values_that_overflow_are_lost_and_not_in_the_sums(operands: Operands) -> None:
    large = Operands(operands.x * 1e6, operands.weight, operands.dy)

    found = product_errors(large, choices("fp16"))["fp16"]

    assert found["Y"].lost > 0
    assert found["Y"].lost + found["Y"].compared == found["Y"].count
    assert found["dX"].lost == 0


def test_a_format_along_a_chosen_axis_has_no_products(operands: Operands) -> None:
    assert set(product_errors(operands, choices("mxfp8:axis=-2,nvfp4:16x16"))) == {"nvfp4:16x16"}


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 8), (6, 8), (4, 5)),
        ((4, 8), (6, 7), (4, 6)),
        ((3, 8), (6, 8), (4, 6)),
        ((8,), (6, 8), (4, 6)),
        ((0, 8), (6, 8), (0, 6)),
    ],
)
def test_operands_of_no_one_call_do_not_fit(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert not Operands(*(torch.ones(shape) for shape in shapes)).fit
    assert Operands(torch.ones(4, 8), torch.ones(6, 8), torch.ones(4, 6)).fit
