"""The alerts of a run: the newest ones of a finished run, and those of a live one as they come."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import CapdError
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import AlertFollower, alerts_path, read_alerts
from capd.store.disk.layout import nodes_of

__all__ = ["FollowedAlerts", "newest_alerts"]

_MAX_ALERTS = 1000
_MAX_FOLLOWED = 200
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
        found += read_alerts(path, start).alerts
    if series is not None:
        found = [one for one in found if series in (one.series, *one.series_paths)]
    found.sort(key=lambda alert: alert.time_ns, reverse=True)
    return {"alerts": [_plain(one) for one in found[:_MAX_ALERTS]], "more": more or len(found) > _MAX_ALERTS}


class FollowedAlerts:
    """The alerts of a live run, the newest of them kept."""

    def __init__(self, run: Path) -> None:
        self._follower = AlertFollower(run)
        self._newest: deque[dict[str, Any]] = deque(maxlen=_MAX_FOLLOWED)
        self._total = 0

    def look(self) -> dict[str, Any]:
        """Read what is new. Return the newest alerts, the newest first, and the number of all."""
        problem = ""
        try:
            for alert in self._follower.new():
                self._newest.append(_plain(alert))
                self._total += 1
        except (CapdError, OSError) as error:
            problem = str(error)
        return {"alerts": list(reversed(self._newest)), "total": self._total, "problem": problem}


def _plain(alert: Alert) -> dict[str, Any]:
    # A browser's numbers do not hold nanoseconds.
    return {**msgspec.structs.asdict(alert), "time_ns": str(alert.time_ns)}
