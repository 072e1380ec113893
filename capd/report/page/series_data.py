"""The series in the page's data: the numbers of each tensor's page."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import msgspec

from capd.report.document import tally_numbers
from capd.report.format_errors import error_numbers
from capd.report.page.group_data import Notes
from capd.report.page.plain import NUMBERS, errors_of, exponents_of, picked, rounded
from capd.report.series import MOST_SERIES, SeriesSummaries, SeriesSummary

__all__ = ["series_data"]

# The limit for all series together.
_POINTS = 10_000
# The limits for one series.
_MOST_POINTS, _LEAST_POINTS = 96, 8
# The same for the records whose shares by exponent are drawn.
_SPREADS, _MOST_SPREAD, _LEAST_SPREAD = 2_000, 64, 2


def series_data(series: SeriesSummaries | None, notes: Notes) -> dict[str, Any]:
    """Return `series`, at most as many as have a page, `series_total`, and the `emulations` that series refer to."""
    if series is None:
        return {"series": [], "series_total": 0, "emulations": []}
    found = list(series)
    if len(series) > MOST_SERIES:
        notes.append({"about": "series", "found": len(series), "shown": MOST_SERIES})
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(1, len(found))))
    if any(one.step > 1 or len(one.points) > most for one in found):
        notes.append({"about": "records", "shown": most})
    widest = max(_LEAST_SPREAD, min(_MOST_SPREAD, _SPREADS // max(1, len(found))))
    emulations = list(dict.fromkeys(one.emulation for one in found))
    return {
        "series": [
            {**_series(one, most, widest), "emulation": emulations.index(one.emulation)} for one in found
        ],
        "series_total": len(series),
        "emulations": emulations,
    }


def _series(one: SeriesSummary, most: int, widest: int) -> dict[str, Any]:
    every = -(-len(one.points) // most)
    points, numbers = one.points[::every], tally_numbers(one.tally)
    spread = points[:: -(-len(points) // widest)] if len(points) > 1 else []
    return {
        "path": one.path,
        **msgspec.structs.asdict(one.key),
        "dtype": one.dtype,
        "shape": list(one.shape),
        **picked(numbers, *NUMBERS),
        "quantiles": rounded(one.quantiles),
        "exponents": exponents_of(numbers),
        "errors": errors_of({label: error_numbers(errors) for label, errors in one.tally.errors.items()}),
        "moments": {
            "iteration": [point.moment.iteration for point in points],
            "micro_batch": [point.moment.micro_batch for point in points],
            **{
                name: [rounded(getattr(point, name)) for point in points]
                for name in ("mean", "std", "absmax")
            },
        },
        "moments_step": one.step * every,
        "spread": {
            "iteration": [point.moment.iteration for point in spread],
            "shares": [point.shares.tolist() for point in spread],
        },
        "outlier": None if one.outlier is None else rounded([*astuple(one.outlier)]),
    }
