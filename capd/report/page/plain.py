"""The document's numbers as the page's data has them: few digits, short lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capd.analyze.groups import STATISTICS
from capd.report.binades import exponent_counts
from capd.strict_json import json_number

__all__ = ["METRICS", "NUMBERS", "errors_of", "exponents_of", "picked", "quantiles_of", "rounded"]

METRICS = {
    "sqnr_db": "10·log10(Σx² / Σd²), in dB: signal to quantisation noise",
    "underflow_percent": "not zero before, zero after, in % of all values",
    "saturation_percent": "finite values beyond the largest one that the format holds, in % of all values",
    "mse": "Σd² / N",
    "cosine": "Σxy / √(Σx² Σy²)",
    "relative": "Σ|d| / Σ|x|",
    "max_abs": "max |d|",
    "flush_percent": "below the smallest normal value, in % of all values",
    "lost_percent": "finite values that became NaN or Inf, in % of all values",
}
"""The metrics of an error that the page shows, in the order of its lists, each with its formula."""

NUMBERS = ("records", "raw_bytes", *STATISTICS)
"""The numbers of a group that are shown with every group."""

_DIGITS = 4


def rounded(value: Any) -> Any:
    """Return a plain value with floats of four digits. Whole floats become integers, NaN and infinities their names."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    short = json_number(float(f"{value:.{_DIGITS}g}"))
    return int(short) if isinstance(short, float) and short.is_integer() and abs(short) < 1e15 else short


def picked(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return some numbers or fields of a group, rounded."""
    return {name: rounded(row[name]) for name in names}


def quantiles_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the quantiles of a group in the order of `QUANTILES`, None if no element was read."""
    return None if row["quantiles"] is None else [rounded(value) for value in row["quantiles"].values()]


def errors_of(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of METRICS for each format, in the order of METRICS."""
    return {label: [rounded(one[name]) for name in METRICS] for label, one in errors.items()}


def exponents_of(row: Mapping[str, Any]) -> list[int]:
    """Return the counts of a group by exponent, as `exponent_counts` does."""
    return exponent_counts({int(bin_): count for bin_, count in row["exponent_histogram"].items()})
