"""The metrics of rules equal what numpy says of the elements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import choices
from capd.analyze.grids import grids
from capd.lab.measuring import measured_bits
from capd.rules.metrics import parse_metric, scalar_value
from capd.store.format.frames import StatsRow
from capd.store.format.statistics import summarise

RNG = np.random.default_rng(5)
VALUES = (RNG.normal(size=50_000) * 2.0 ** RNG.integers(-30, 20, 50_000)).astype("f4")
VALUES[::97] = 0
VALUES[5], VALUES[6], VALUES[7] = np.nan, np.inf, -np.inf
FINITE = VALUES[np.isfinite(VALUES)].astype("f8")
STATS = summarise(VALUES, "float32")


def value(metric: str, stats: StatsRow = STATS) -> float:
    compute = parse_metric(metric).value
    assert compute is not None
    found = compute(stats)
    assert found is not None
    return found


def test_counts_and_moments() -> None:
    assert (value("nan"), value("inf"), value("zeros")) == (1, 2, (FINITE == 0).sum() / VALUES.size)
    assert value("absmax") == np.abs(FINITE).max()
    assert value("mean") == pytest.approx(FINITE.mean())
    assert value("rms") == pytest.approx(np.sqrt((FINITE**2).mean()))
    assert value("std") == pytest.approx(FINITE.std())


@pytest.mark.parametrize("fmt", sorted(grids().keys() - {"bf16"}))
def test_the_underflow_of_a_format_is_exact(fmt: str) -> None:
    sizes = np.abs(FINITE)
    below = ((sizes > 0) & (sizes < grids()[fmt].smallest)).sum()
    assert below > 0
    assert value(f"underflow:{fmt}") == below / VALUES.size


@pytest.mark.parametrize("fmt", sorted(grids()))
def test_the_saturation_of_a_format_counts_what_is_surely_above(fmt: str) -> None:
    largest = grids()[fmt].largest
    surely = (np.abs(FINITE) >= 2.0 ** math.frexp(largest)[1]).sum()
    assert value(f"saturation:{fmt}") == surely / VALUES.size
    assert value(f"near_max:{fmt}") == np.abs(FINITE).max() / largest


def test_one_value_between_the_largest_and_the_next_power_of_two_counts() -> None:
    at, above = (summarise(np.array([1, number], "f4"), "float32") for number in (448, 449))
    assert value("saturation:e4m3", at) == 0
    assert value("saturation:e4m3", above) == 0.5


def test_the_exponent_of_a_quantile() -> None:
    exponents = np.sort(np.floor(np.log2(np.abs(FINITE[FINITE != 0]))))
    for part in (0.0, 0.5, 0.999, 1.0):
        at = max(0, math.ceil(part * exponents.size) - 1)
        assert value(f"exponent:{part}") == exponents[at]


def test_a_record_without_finite_elements_has_no_value() -> None:
    stats = summarise(np.full(4, np.nan, "f4"), "float32")
    for metric in ("absmax", "mean", "std", "rms", "near_max:e4m3", "exponent:0.5"):
        compute = parse_metric(metric).value
        assert compute is not None
        assert compute(stats) is None
    assert value("nan", stats) == 4
    assert value("saturation:e4m3", stats) == 0


@pytest.mark.parametrize("number", [0.0, -2.5, 1e300, 3e-320, math.inf, math.nan])
def test_the_value_of_a_scalar_is_exact(number: float) -> None:
    found = scalar_value(summarise(np.array([number], "f8"), "float64"))
    assert found == number or (found is not None and math.isnan(found) and math.isnan(number))


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4:16x16", "mxfp4:rceil", "hifp8"])
def test_errors_of_a_format_are_those_of_compare(fmt: str) -> None:
    values = (RNG.normal(size=(32, 64)) * 2.0 ** RNG.integers(-12, 12, (32, 64))).astype("f4")
    found, _ = measured_bits(values, "float32", choices(fmt))
    errors = found[fmt]

    def number(kind: str) -> float | None:
        metric = parse_metric(f"{kind}:{fmt}")
        assert metric.errors is not None
        assert (metric.fmt, metric.of, metric.value) == (fmt, "tensor", None)
        return metric.errors(errors)

    assert number("sqnr") == errors.sqnr_db
    assert number("relative_error") == errors.relative
    assert number("flushed") == errors.flushes / values.size
    if errors.blocks is not None:
        assert errors.underflows > 0
        assert number("underflow") == errors.underflows / values.size
        assert number("saturation") == errors.saturations / values.size
        assert number("scale_std") == errors.blocks.scale_log2_std
    assert parse_metric("underflow:hifp8").value is not None


def test_errors_of_nothing_have_no_number() -> None:
    for kind in ("sqnr", "relative_error", "underflow", "saturation", "flushed", "scale_std"):
        compute = parse_metric(f"{kind}:mxfp8").errors
        assert compute is not None
        assert compute(Errors()) is None
