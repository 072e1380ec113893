"""The alerts of a report: what rules said about its runs, whatever else the report selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from capd.store.read.store import open_store

__all__ = ["alert_rows"]


def alert_rows(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return the alerts of some runs in order of time. Each has `source` and the members of `capd alerts --json`."""
    return [
        {"source": source, **msgspec.structs.asdict(alert)}
        for source in sources
        for alert in open_store(source).alerts
    ]
