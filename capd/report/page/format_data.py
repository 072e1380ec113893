"""What formats make of the values, as the page's data has it: their grids, HiFloat8's regimes and codes, overflow."""

from __future__ import annotations

from typing import Any

from capd.analyze.distribution import Distribution
from capd.analyze.grids import Grid, Overflow, grids, severity
from capd.analyze.groups import Groups, Value
from capd.analyze.hif8_regimes import FINITE_CODES, Hif8Use, exponent_errors, hif8_use
from capd.report.format_use import overflow_by_type
from capd.report.page.plain import short

__all__ = ["grids_data", "hif8_data", "overflow_data"]

_COUNTS = ("count", "nan", "inf", "zero", "above", "below", "flushed")
_PERCENTS = ("above_percent", "below_percent", "flushed_percent")


def grids_data() -> list[dict[str, Any]]:
    """The range of each format, and how many mantissa bits it has at each exponent."""
    return [_grid(grid) for grid in grids().values()]


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "label": grid.label,
        "largest": grid.largest,
        "normal": grid.normal,
        "smallest": grid.smallest,
        "steps": [[exponent, bits] for exponent, bits in sorted(grid.mantissa_bits.items())],
    }


def hif8_data(groups: Groups) -> list[dict[str, Any]]:
    """Of all values (quant_type None) and of each quant type; empty where no element was read."""
    found: dict[Value, Distribution | None] = {None: groups.whole().distribution}
    found |= {one: tally.distribution for (one,), tally in groups.by("quant_type").items()}
    return [
        {"quant_type": one, **_use(hif8_use(each)), "by_exponent": _by_exponent(each)}
        for one, each in found.items()
        if each is not None
    ]


def _use(use: Hif8Use) -> dict[str, Any]:
    return {
        "finite": use.finite,
        "exact": use.exact,
        "codes_used": use.codes_used,
        "finite_codes": FINITE_CODES,
        "entropy_bits": short(use.entropy_bits),
        "codes": use.codes.tolist(),
        "regimes": [
            {
                "name": one.name,
                "mantissa_bits": one.mantissa_bits,
                "count": one.count,
                "share": short(one.share),
                "codes": one.codes,
                "codes_used": one.codes_used,
                "mean": short(one.errors.mae),
                "relative": short(one.errors.relative),
                "sqnr_db": short(one.errors.sqnr_db),
            }
            for one in use.regimes
        ],
    }


def _by_exponent(distribution: Distribution) -> dict[str, Any]:
    found = exponent_errors(distribution)
    return {
        "exponents": list(found.exponents),
        "counts": list(found.counts),
        **{
            name: {
                label: [short(getattr(one, name)) for one in errors] for label, errors in found.errors.items()
            }
            for name in ("relative", "sqnr_db")
        },
    }


def overflow_data(groups: Groups) -> list[dict[str, Any]]:
    """By quant type and format: of the values as they are, and under one scale for all of the type."""
    if groups.whole().distribution is None:
        return []
    return [
        {"quant_type": one, **_overflow(found)}
        for one, of_type in overflow_by_type(groups).items()
        for pair in of_type.values()
        for found in pair
    ]


def _overflow(found: Overflow) -> dict[str, Any]:
    return {
        "label": found.label,
        "scaled": found.scaled,
        **{name: getattr(found, name) for name in _COUNTS},
        **{name: short(getattr(found, name)) for name in _PERCENTS},
        "severity_above": severity(found.above_percent),
        "severity_below": severity(found.below_percent),
    }
