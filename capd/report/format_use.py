"""The numbers behind the pages of HiFP8 and of overflow by format, for the JSON and the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capd.analyze.distribution import Distribution
from capd.analyze.error_sums import Errors
from capd.analyze.grids import Overflow, grids, overflow_of, severity
from capd.analyze.groups import Groups, Value
from capd.analyze.hif8_regimes import FINITE_CODES, Hif8Use, exponent_errors, hif8_use
from capd.report.names import value_text
from capd_client.texts import human_count, table_lines

__all__ = ["RANGES", "Found", "format_lines", "format_numbers", "overflow_by_type"]

RANGES = ("hifp8", "e4m3", "e5m2", "e2m1", "fp16", "bf16")
"""The grids that values are held against, by their labels (`capd.analyze.grids`)."""
Found = tuple[Overflow, Overflow]


def overflow_by_type(groups: Groups) -> dict[Value, dict[str, Found]]:
    """By quant type and grid what lies outside: of the values as they are, and under one scale for all of the type."""
    return {
        one: {
            name: (overflow_of(each, grids()[name]), overflow_of(each, grids()[name], scaled=True))
            for name in RANGES
        }
        for one, each in _distributions(groups).items()
    }


def _distributions(groups: Groups) -> dict[Value, Distribution]:
    found = {one: tally.distribution for (one,), tally in groups.by("quant_type").items()}
    return {one: each for one, each in found.items() if each is not None}


def format_numbers(groups: Groups) -> dict[str, Any]:
    """`hifp8`, `error_by_exponent` and `overflow` of `global_statistics.json`; empty where no element was read."""
    whole = groups.whole().distribution
    if whole is None:
        return {"hifp8": [], "error_by_exponent": None, "overflow": []}
    by_exponent = exponent_errors(whole)
    return {
        "hifp8": [
            {"quant_type": one, **_use(hif8_use(each))} for one, each in _distributions(groups).items()
        ],
        "error_by_exponent": {
            "exponents": list(by_exponent.exponents),
            "counts": list(by_exponent.counts),
            "relative_error": {
                name: [one.relative for one in errors] for name, errors in by_exponent.errors.items()
            },
        },
        "overflow": [
            {"quant_type": one, "format": name, **_overflow(*found)}
            for one, of_type in overflow_by_type(groups).items()
            for name, found in of_type.items()
        ],
    }


def _use(use: Hif8Use) -> dict[str, Any]:
    return {
        "finite": use.finite,
        "exact": use.exact,
        "codes_used": use.codes_used,
        "codes_used_share": use.codes_used / FINITE_CODES,
        "entropy_bits": use.entropy_bits,
        **_errors(use.errors),
        "regimes": [
            {
                "regime": one.name,
                "mantissa_bits": one.mantissa_bits,
                "count": one.count,
                "share": one.share,
                "codes": one.codes,
                "codes_used": one.codes_used,
                **_errors(one.errors),
            }
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
        **{
            name: getattr(found, name)
            for name in ("count", "nan", "inf", "zero", "above", "below", "flushed")
        },
        "below_scaled": scaled.below,
        "flushed_scaled": scaled.flushed,
        "above_severity": severity(found.above_percent),
        "below_severity": severity(found.below_percent),
    }


def format_lines(groups: Groups) -> Iterator[str]:
    """The same as tables; nothing where no element was read."""
    found = _distributions(groups)
    if not found:
        return
    yield ""
    names = ("values", "share", "codes", "in use", "mean error", "relative", "SQNR dB")
    rows = [row for one, each in found.items() for row in _use_rows(value_text(one), hif8_use(each))]
    yield from table_lines(("HiFP8 of", "regime", *names), rows, names)
    yield ""
    shares = ("above", "below", "subnormal", "below, scaled", "NaN, Inf")
    rows = [
        (
            value_text(one), name,
            *map(_percent, (
                plain.above_percent, plain.below_percent, plain.flushed_percent, scaled.below_percent,
                plain.nonfinite_percent,
            )),
            severity(plain.above_percent), severity(plain.below_percent),
        )
        for one, of_type in overflow_by_type(groups).items()
        for name, (plain, scaled) in of_type.items()
    ]  # fmt: skip
    header = ("overflow of", "format", *shares, "overflow", "underflow")
    yield from table_lines(header, rows, shares)


def _use_rows(one: str, use: Hif8Use) -> Iterator[tuple[str, ...]]:
    for regime in use.regimes:
        yield (
            one, regime.name, human_count(regime.count), _percent(100 * regime.share), str(regime.codes),
            str(regime.codes_used), *_error_cells(regime.errors),
        )  # fmt: skip
    yield (
        one, "all", human_count(use.finite), _percent(100.0 if use.finite else 0.0), str(FINITE_CODES),
        str(use.codes_used), *_error_cells(use.errors),
    )  # fmt: skip


def _error_cells(errors: Errors) -> tuple[str, str, str]:
    relative = None if errors.relative is None else 100 * errors.relative
    sqnr = "-" if errors.sqnr_db is None else f"{errors.sqnr_db:.2f}"
    return "-" if errors.mae is None else f"{errors.mae:.4g}", _percent(relative), sqnr


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.4g} %"
