"""Alerts in the file of a run, as a daemon appends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capd.store.alerts.alert import Alert
from capd.store.alerts.file import AlertWriter

__all__ = ["alert", "give_alerts"]


def alert(number: int = 0, **changes: Any) -> Alert:
    """An alert at an iteration."""
    fields: dict[str, Any] = {
        "time_ns": number, "rule": "nan", "severity": "warning", "metric": "nan", "run": "run", "node": "n", "rank": 0,
        "iteration": number, "micro_batch": 0, "series": "a/b", "value": 1.0, "limit": 0.0, "text": "a text",
        "count": 1, "series_paths": ["a/b"],
    }  # fmt: skip
    return Alert(**{**fields, **changes})


def give_alerts(run: Path, node: str, *alerts: Alert) -> None:
    """Append alerts to the file of a node."""
    AlertWriter(run, node, durable=False).append(alerts)
