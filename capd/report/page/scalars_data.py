"""The scalars in the page's data: lines over the iterations, few enough points to draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from capd.report.page.group_data import Notes
from capd.report.page.plain import rounded
from capd.report.scalars.scalar_lines import reduced

__all__ = ["scalars_data"]

_MOST_SCALARS, _MOST_POINTS = 40, 400


def scalars_data(plain: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """Return the lines of the scalars of `plain`, the report's document.

    A long line is cut into equal parts. Each is drawn at its last iteration, by its mean, minimum and maximum.
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
    first = np.arange(parts) * found // parts
    drawn = reduced({name: np.array(line[name], np.float64) for name in ("mean", "min", "max")}, first)
    last = [line["iteration"][place - 1] for place in (*first[1:], found)]
    return {**line, "iteration": last, **{name: rounded(values) for name, values in drawn.items()}}
