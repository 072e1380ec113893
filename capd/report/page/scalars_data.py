"""The scalars in the page's data: lines over the iterations, few enough points to draw."""

from __future__ import annotations

from typing import Any

from capd.report.page.group_data import Notes
from capd.report.page.plain import rounded

__all__ = ["scalars_data"]

_MOST_SCALARS, _MOST_POINTS = 40, 400
_LISTS = ("iteration", "mean", "min", "max")


def scalars_data(plain: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """Return the lines of the scalars of `plain`, the report's document. Long ones are thinned evenly."""
    lines = plain["scalars"]
    if len(lines) > _MOST_SCALARS:
        notes.append({"about": "scalars", "found": len(lines), "shown": _MOST_SCALARS})
    if any(len(line["iteration"]) > _MOST_POINTS for line in lines):
        notes.append({"about": "points", "shown": _MOST_POINTS})
    return [_thinned(line) for line in lines[:_MOST_SCALARS]]


def _thinned(line: dict[str, Any]) -> dict[str, Any]:
    every = -(-len(line["iteration"]) // _MOST_POINTS)
    return {**line, **{name: rounded(line[name][::every]) for name in _LISTS}}
