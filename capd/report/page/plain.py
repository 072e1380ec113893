"""Numbers and groups as the page's data has them: few digits, short lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from capd.analyze.distribution import Distribution
from capd.analyze.error_sums import Errors
from capd.analyze.groups import STATISTICS, Fields, Tally, Value
from capd.report.quantiles import QUANTILES
from capd.store.statistics import Stats

__all__ = [
    "METRICS",
    "errors_plain",
    "exponents_of",
    "fields_plain",
    "quantiles_plain",
    "short",
    "tally_plain",
]

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
"""What is shown of `capd.analyze.error_sums.Errors`, in the order of the page's lists, each with its formula."""

_DIGITS = 4
_BIAS, _NONFINITE_BIN = 127, 255


def short(value: float | None) -> float | int | str | None:
    """A number with four digits; whole ones whole; NaN and infinities by name."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def fields_plain(fields: Fields, values: Sequence[Value]) -> dict[str, Value]:
    """The fields of a group."""
    return dict(zip(fields, values, strict=True))


def tally_plain(tally: Tally) -> dict[str, Any]:
    """Counts and statistics of some records, without their quantiles."""
    stats = tally.stats
    return {
        "records": tally.records,
        "raw_bytes": tally.raw_bytes,
        **{name: short(getattr(stats, name)) for name in STATISTICS},
    }


def quantiles_plain(source: Tally | Distribution | None) -> list[Any] | None:
    """At QUANTILES; None where no element was read."""
    distribution = source.distribution if isinstance(source, Tally) else source
    found = None if distribution is None else distribution.quantiles(QUANTILES)
    return None if found is None else [short(value) for value in found]


def errors_plain(errors: Mapping[str, Errors]) -> dict[str, list[Any]]:
    """By format the values of METRICS, in its order."""
    return {label: [short(getattr(one, name)) for name in METRICS] for label, one in errors.items()}


def exponents_of(stats: Stats) -> list[int]:
    """The first e, then how many values have 2^e ≤ |x| < 2^(e+1), from it on; empty where there is none but zeros."""
    counts = stats.exponent_histogram
    present = [bin_ for bin_ in counts if 0 < bin_ < _NONFINITE_BIN]
    if not present:
        return []
    first, last = min(present), max(present)
    return [first - _BIAS, *(counts.get(bin_, 0) for bin_ in range(first, last + 1))]
