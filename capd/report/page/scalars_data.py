"""The scalars in the page's data: lines over the iterations, few enough points to draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from capd.report.page.group_data import Notes
from capd.report.page.plain import rounded

__all__ = ["scalars_data"]

_MOST_SCALARS, _MOST_POINTS = 40, 400


def scalars_data(plain: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """Return the lines of the scalars of `plain`, the report's document.

    A long line is cut into equal parts. Each is drawn at its last iteration, by its mean, minimum and maximum, so that
    no spike and no NaN disappears.
    """
    lines = plain["scalars"]
    if len(lines) > _MOST_SCALARS:
        notes.append({"about": "scalars", "found": len(lines), "shown": _MOST_SCALARS})
    if any(len(line["iteration"]) > _MOST_POINTS for line in lines):
        notes.append({"about": "points", "shown": _MOST_POINTS})
    return [_drawn(line) for line in lines[:_MOST_SCALARS]]


def _drawn(line: dict[str, Any]) -> dict[str, Any]:
    found = len(line["iteration"])
    parts = min(found, _MOST_POINTS)
    first = np.arange(parts) * found // max(1, parts)
    counts = np.diff(np.append(first, found))
    mean, least, most = (np.array(line[name], np.float64) for name in ("mean", "min", "max"))
    # A NaN makes the mean NaN, and so do infinities of both signs.
    with np.errstate(invalid="ignore", over="ignore"):
        drawn = {
            "mean": np.add.reduceat(mean, first) / counts,
            "min": np.fmin.reduceat(least, first),
            "max": np.fmax.reduceat(most, first),
        }
    last = [line["iteration"][place] for place in first + counts - 1]
    return {**line, "iteration": last, **{name: rounded(values.tolist()) for name, values in drawn.items()}}
