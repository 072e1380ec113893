"""The alerts in the page's data: the first of them, as a browser can hold them."""

from __future__ import annotations

from typing import Any

from capd.report.page.group_data import Notes

__all__ = ["alerts_data"]

_MOST_ALERTS = 1000
_SHOWN = ("source", "rule", "severity", "rank", "iteration", "series", "count", "text")


def alerts_data(plain: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """Return the alerts of `plain`, the report's document, without what the page does not show."""
    found = plain["alerts"]
    if len(found) > _MOST_ALERTS:
        notes.append({"about": "alerts", "found": len(found), "shown": _MOST_ALERTS})
    # A browser's numbers do not hold nanoseconds.
    return [
        {"time_ns": str(one["time_ns"]), **{name: one[name] for name in _SHOWN}}
        for one in found[:_MOST_ALERTS]
    ]
