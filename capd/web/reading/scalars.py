"""The scalars of runs by iteration, such as the loss: read from statistics, because a scalar is its own mean."""

from __future__ import annotations

from typing import Any

from capd.store.format.frames import StatsRow
from capd.store.format.statistics import public
from capd.web.reading.catalogs import RunCatalogs
from capd.web.reading.lines import add_rows, gaps, merged_by_iteration

__all__ = ["scalar_lines", "scalar_names"]

_MAX_NAMES = 10_000
_MAX_RANKS = 64
_MAX_POINTS = 2000
# Of all ranks together.
_MAX_ROWS = 32_000


def scalar_names(run: RunCatalogs) -> list[str]:
    """Return the names of the scalars of a run, in order."""
    return sorted({place.row.header.key.tensor_name for place in run.scalars(None, _MAX_NAMES)})


def scalar_lines(run: RunCatalogs, name: str) -> dict[str, Any]:
    """Return one scalar of a run: the mean, the smallest and the largest value over ranks and micro-batches.

    If a run has many values, every `step`-th one of each rank is read.
    """
    places = run.scalars(name, _MAX_RANKS)
    most = max((place.row.records for place in places), default=0)
    each = min(_MAX_POINTS, _MAX_ROWS // max(1, len(places)))
    step = -(-most // each) or 1
    ranks = sorted({place.row.header.key.rank for place in places})
    merged: dict[int, StatsRow] = {}
    for rank in ranks:
        # Within a rank, a later attempt replaces an earlier one, also on another node.
        of_rank = [place for place in places if place.row.header.key.rank == rank]
        add_rows(
            merged, merged_by_iteration(row for _, rows in run.rows(of_rank, step, each) for row in rows)
        )
    points = [(iteration, public(row)) for iteration, row in sorted(merged.items())]
    iterations = [iteration for iteration, _ in points]
    return {
        "name": name,
        "ranks": ranks,
        "step": step,
        "iteration": iterations,
        "gap_after": gaps(iterations),
        **{
            field: [getattr(stats, field) for _, stats in points]
            for field in ("mean", "min", "max", "nan", "inf")
        },
    }
