"""The alerts of a run: the newest ones of a finished run, and those of a live one as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from capd.live.alerts import NewestAlerts
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import alerts_path, read_alerts
from capd.store.disk.layout import nodes_of

__all__ = ["live_alerts", "newest_alerts"]

_MAX_ALERTS = 1000
# Of the file of each node, from its end.
_MAX_NBYTES = 1 << 20


def newest_alerts(run: Path, series: str | None = None) -> dict[str, Any]:
    """Return the newest alerts of a run, the newest first.

    Args:
        run: The run.
        series: The path of a series whose alerts are wanted alone.

    Returns:
        `alerts`, and `more`: whether there are older ones.

    Raises:
        StoreError: A file cannot be read.
    """
    found: list[Alert] = []
    more = False
    for node in nodes_of(run):
        path = alerts_path(run, node)
        nbytes = path.stat().st_size if path.is_file() else 0
        # The first line is then a part of one, which counts as damaged.
        start = max(0, nbytes - _MAX_NBYTES)
        more |= start > 0
        found += read_alerts(path, start).items
    if series is not None:
        found = [one for one in found if series in (one.series, *one.series_paths)]
    found.sort(key=lambda alert: alert.time_ns, reverse=True)
    return {"alerts": [_plain(one) for one in found[:_MAX_ALERTS]], "more": more or len(found) > _MAX_ALERTS}


def live_alerts(followed: NewestAlerts) -> dict[str, Any]:
    """Return the newest alerts of a live run after one more look, the newest first, and the number of all."""
    followed.look()
    return {
        "alerts": [_plain(one) for one in reversed(followed.newest)],
        "total": followed.counts.total(),
        "problem": followed.problem,
    }


def _plain(alert: Alert) -> dict[str, Any]:
    # A browser's numbers do not hold nanoseconds.
    return {**msgspec.structs.asdict(alert), "time_ns": str(alert.time_ns)}
