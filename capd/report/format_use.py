"""The fit of values to number formats: HiFloat8's regimes and codes, errors by magnitude, values out of range.

The results are plain numbers, for the report's document and its page.
"""

from __future__ import annotations

from typing import Any

from capd.analyze.distribution import Distribution
from capd.analyze.error_sums import Errors
from capd.analyze.grids import Overflow, grids, overflow_of, severity
from capd.analyze.groups import Groups, Value
from capd.analyze.hif8_regimes import FINITE_CODES, Hif8Use, exponent_errors, hif8_use

__all__ = [
    "RANGES", "exponent_numbers", "format_numbers", "hif8_numbers", "of_types", "overflow_by_type", "overflow_numbers",
]  # fmt: skip

RANGES = ("hifp8", "e4m3", "e5m2", "e2m1", "fp16", "bf16")
"""The labels of the grids (`capd.analyze.grids`) against which values are checked."""
_REGIME = ("mantissa_bits", "count", "share", "codes", "codes_used")
_OUTSIDE = ("count", "nan", "inf", "zero", "above", "below", "flushed")


def of_types(groups: Groups) -> dict[Value, Distribution]:
    """Return the distribution of each quant type with elements that were read."""
    found = {one: tally.distribution for (one,), tally in groups.by("quant_type").items()}
    return {one: each for one, each in found.items() if each is not None}


def overflow_by_type(groups: Groups) -> dict[Value, dict[str, tuple[Overflow, Overflow]]]:
    """Count the values outside of each grid by quant type: without a scale, and under one scale for the whole type."""
    return {one: _outside(each) for one, each in of_types(groups).items()}


def overflow_numbers(distribution: Distribution) -> list[dict[str, Any]]:
    """Return the counts of a distribution outside of each grid: without a scale, and under one scale for all of it."""
    return [{"format": name, **_overflow(*found)} for name, found in _outside(distribution).items()]


def _outside(distribution: Distribution) -> dict[str, tuple[Overflow, Overflow]]:
    return {
        name: (
            overflow_of(distribution, grids()[name]),
            overflow_of(distribution, grids()[name], scaled=True),
        )
        for name in RANGES
    }


def format_numbers(groups: Groups) -> dict[str, Any]:
    """Return `hifp8`, `error_by_exponent` and `overflow` of the report's document, empty if no element was read."""
    whole = groups.whole().distribution
    if whole is None:
        return {"hifp8": [], "error_by_exponent": None, "overflow": []}
    return {
        "hifp8": [
            {"quant_type": one, **hif8_numbers(hif8_use(each))} for one, each in of_types(groups).items()
        ],
        "error_by_exponent": exponent_numbers(whole, relative_error="relative"),
        "overflow": [
            {"quant_type": one, **row}
            for one, each in of_types(groups).items()
            for row in overflow_numbers(each)
        ],
    }


def exponent_numbers(distribution: Distribution, **metrics: str) -> dict[str, Any]:
    """Return the errors of formats without a scale, by the exponent of the value.

    They are `exponents`, the `counts` of their values, and for each metric and format a number for each exponent.
    `metrics` names the property of `Errors` for each metric.
    """
    found = exponent_errors(distribution)
    return {
        "exponents": list(found.exponents),
        "counts": list(found.counts),
        **{
            name: {label: [getattr(one, metric) for one in errors] for label, errors in found.errors.items()}
            for name, metric in metrics.items()
        },
    }


def hif8_numbers(use: Hif8Use) -> dict[str, Any]:
    """Return the use of HiFloat8's codes and its errors on the values, also by regime."""
    return {
        "finite": use.finite,
        "exact": use.exact,
        "codes_used": use.codes_used,
        "codes_used_share": use.codes_used / FINITE_CODES,
        "entropy_bits": use.entropy_bits,
        **_errors(use.errors),
        "regimes": [
            {"regime": one.name, **{name: getattr(one, name) for name in _REGIME}, **_errors(one.errors)}
            for one in use.regimes
        ],
    }


def _errors(errors: Errors) -> dict[str, Any]:
    return {"mean_error": errors.mae, "relative_error": errors.relative, "sqnr_db": errors.sqnr_db}


def _overflow(found: Overflow, scaled: Overflow) -> dict[str, Any]:
    grid = grids()[found.label]
    return {
        "largest": grid.largest,
        "smallest_normal": grid.normal,
        "smallest": grid.smallest,
        **{name: getattr(found, name) for name in _OUTSIDE},
        "below_scaled": scaled.below,
        "flushed_scaled": scaled.flushed,
        "above_severity": severity(found.above_percent),
        "below_severity": severity(found.below_percent),
    }
