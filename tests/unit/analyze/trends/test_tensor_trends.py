"""Metrics of tensors without a format: moments, spectra and products, against numpy in float64."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.analyze.format_choice import choices
from capd.analyze.trends.accumulation import ACCUMULATORS, accumulated, accumulations
from capd.analyze.trends.moments import PowerSums, power_sums
from capd.analyze.trends.spectrum import Spectrum, largest_singular_values, spectrum_of

RNG = np.random.default_rng(7)


def kurtosis(x: np.ndarray) -> float:
    centred = x - x.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_moments_are_those_of_numpy(dtype: torch.dtype, mean: float) -> None:
    x = torch.from_numpy(RNG.laplace(mean, 2.0, (300, 700))).to(dtype)
    values = x.to(torch.float32).double().numpy()

    numbers = power_sums(x).numbers()

    assert numbers["values"] == values.size
    assert numbers["kurtosis"] == pytest.approx(kurtosis(values), rel=1e-8)
    assert numbers["crest_factor"] == pytest.approx(
        np.abs(values).max() / math.sqrt((values**2).mean()), rel=1e-12
    )
    assert numbers["absmax"] == np.abs(values).max()


def test_normal_uniform_and_two_valued_tensors_have_their_known_kurtosis() -> None:
    normal, uniform = RNG.normal(size=1 << 20), RNG.uniform(-1, 1, 1 << 20)
    signs = torch.tensor([1.0, -1.0]).repeat(500)
    assert power_sums(torch.from_numpy(normal)).kurtosis == pytest.approx(3.0, abs=0.03)
    assert power_sums(torch.from_numpy(uniform)).kurtosis == pytest.approx(1.8, abs=0.01)
    assert power_sums(signs).kurtosis == 1.0
    assert power_sums(signs).crest_factor == 1.0


@pytest.mark.parametrize("value", [0.0, 3.0, 0.1, -1e30, 1e-40])
def test_equal_values_have_no_kurtosis(value: float) -> None:
    assert power_sums(torch.full((1000,), value)).kurtosis is None


def test_nan_inf_and_empty_tensors_are_left_out_of_moments() -> None:
    x = torch.tensor([math.nan, math.inf, 1.0, -1.0, 3.0])
    found = power_sums(x)
    assert (found.count, found.finite) == (5, 3)
    assert found.kurtosis == pytest.approx(kurtosis(np.array([1.0, -1.0, 3.0])))
    for empty in (torch.zeros(0), torch.full((3,), math.nan)):
        assert power_sums(empty).numbers() == {
            "values": empty.numel(), "kurtosis": None, "crest_factor": None, "absmax": None,
        }  # fmt: skip


SAMPLES = [torch.from_numpy(RNG.normal(size=200) * 10.0 ** RNG.integers(-5, 5)).float() for _ in range(10)]


@given(st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_moments_merge_to_those_of_the_whole_in_any_order(random: Random) -> None:
    order = list(range(len(SAMPLES)))
    random.shuffle(order)
    merged, straight = PowerSums(), PowerSums()
    for number in order:
        merged.add(power_sums(SAMPLES[number]))
    for one in SAMPLES:
        straight.add(power_sums(one))
    assert merged == straight
    assert merged.kurtosis == straight.kurtosis
    assert merged.kurtosis == pytest.approx(kurtosis(torch.cat(SAMPLES).double().numpy()), rel=1e-9)


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (300, 500), (4, 100, 32)])
def test_the_spectrum_is_that_of_numpy(shape: tuple[int, ...]) -> None:
    columns = shape[-1]
    # A spectrum that falls as fast as one of training, not that of noise.
    x = RNG.normal(size=(math.prod(shape) // columns, columns)) @ np.diag(np.logspace(0, -2, columns))
    sigma = np.linalg.svd(x.astype(np.float32).astype(np.float64), compute_uv=False)

    found = spectrum_of(torch.from_numpy(x).float().reshape(shape), 8)

    assert isinstance(found, Spectrum)
    numbers = found.numbers()
    assert numbers["stable_rank"] == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-4)
    assert numbers["top_percent"] == pytest.approx(100 * (sigma[:8] ** 2).sum() / (sigma**2).sum(), rel=1e-4)
    assert numbers["full_rank"] == min(x.shape)


def test_diagonal_and_rank_one_matrices_have_their_known_stable_rank() -> None:
    for size in (64, 300):
        diagonal, one = spectrum_of(torch.eye(size) * 5, 4), spectrum_of(torch.ones(size, size + 3), 4)
        assert isinstance(diagonal, Spectrum)
        assert isinstance(one, Spectrum)
        assert diagonal.numbers()["stable_rank"] == pytest.approx(size, rel=1e-4)
        assert diagonal.numbers()["top_percent"] == pytest.approx(100 * 4 / size, rel=1e-4)
        assert one.numbers()["stable_rank"] == pytest.approx(1.0)
        assert one.numbers()["first_percent"] == pytest.approx(100.0)
    falling = spectrum_of(torch.diag(torch.tensor([4.0, 2.0, 2.0])), 1)
    assert isinstance(falling, Spectrum)
    assert falling.numbers()["stable_rank"] == pytest.approx(24 / 16)


def test_a_random_projection_gives_the_same_numbers_every_time_and_never_more_than_there_is() -> None:
    x = torch.from_numpy(RNG.normal(size=(400, 600))).float()
    one, other = largest_singular_values(x, 8), largest_singular_values(x, 8)
    sigma = np.linalg.svd(x.double().numpy(), compute_uv=False)[:8]
    np.testing.assert_array_equal(one, other)
    assert (one <= sigma * (1 + 1e-5)).all()
    # Noise, whose singular values lie close together, is the hardest case.
    np.testing.assert_allclose(one, sigma, rtol=0.005)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (torch.ones(5), "fewer than two dimensions"), (torch.ones(0, 3), "no values"),
        (torch.zeros(3, 3), "only zeros"), (torch.full((2, 2), math.nan), "NaN"),
        (torch.full((2, 2), 1e300, dtype=torch.float64), "Inf"),
    ],
)  # fmt: skip
def test_what_has_no_spectrum_says_why(values: torch.Tensor, says: str) -> None:
    found = spectrum_of(values, 3)
    assert isinstance(found, str)
    assert says in found


def rounded(value: Fraction, digits: int) -> Fraction:
    """Round to significant bits, ties to even, on whole numbers alone."""
    if not value:
        return value
    exponent = 0
    size = abs(value)
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    step = Fraction(2) ** (exponent - digits + 1)
    return round(value / step) * step


def product(a: list[int], b: list[int], name: str) -> Fraction:
    """One value of the product, in fractions."""
    digits, step, promoted = ACCUMULATORS[name]
    total, upper = Fraction(0), Fraction(0)
    for start in range(0, len(a), step):
        part = sum(
            (Fraction(x) * y for x, y in zip(a[start : start + step], b[start : start + step], strict=True)),
            Fraction(0),
        )
        total = rounded(total + part, digits)
        if promoted and (start + step) % promoted == 0:
            upper, total = rounded(upper + total, 24), Fraction(0)
    return rounded(upper + total, 24) if promoted else total


@pytest.mark.parametrize("name", list(ACCUMULATORS))
@pytest.mark.parametrize("inner", [100, 300, 512])
def test_partial_sums_are_rounded_as_in_fractions(name: str, inner: int) -> None:
    a, b = RNG.integers(-1000, 1000, (3, inner)), RNG.integers(-1000, 1000, (2, inner))
    found = accumulated(a.astype(float), b.astype(float), ACCUMULATORS[name])
    for (row, column), value in np.ndenumerate(found):
        assert Fraction(float(value)) == product(a[row].tolist(), b[column].tolist(), name)


def test_fewer_bits_lose_more_and_a_promoted_sum_wins_over_a_long_one() -> None:
    # Positive products, whose long sum swallows its new parts.
    x, weight = torch.from_numpy(RNG.uniform(0.5, 1, (16, 8192))).float(), torch.ones(8, 8192)
    found, problems = accumulations(x, weight, choices("mxfp8"))
    db = {label: one.numbers()["sqnr_db"] for label, one in found.items()}
    assert problems == []
    assert list(found) == [f"{kind} {name}" for kind in ("captured", "mxfp8") for name in ACCUMULATORS]
    assert db["captured fp32"] > db["captured 14-bit promoted"] > db["captured 14-bit"] > db["captured bf16"]  # type: ignore[operator]
    exact = (x.double() @ weight.double().t()).numpy()
    d = accumulated(x.double().numpy(), weight.double().numpy(), ACCUMULATORS["bf16"]) - exact
    assert db["captured bf16"] == pytest.approx(10 * math.log10((exact**2).sum() / (d**2).sum()))


def test_exact_sums_have_no_error() -> None:
    found, _ = accumulations(torch.ones(2, 64), torch.ones(3, 64), ())
    assert {one.numbers()["sqnr_db"] for one in found.values()} == {math.inf}


def test_operands_that_do_not_fit_say_so() -> None:
    for x, weight in (
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(0, 3), torch.ones(2, 3)),
        (torch.ones(3), torch.ones(3)),
    ):
        assert accumulations(x, weight, ())[0] == {}
    found, problems = accumulations(torch.ones(2, 3), torch.ones(2, 3), choices("mxfp8:axis=5"))
    assert "captured fp32" in found
    assert "mxfp8:axis=5" in problems[0]
