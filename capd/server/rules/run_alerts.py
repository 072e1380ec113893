"""The alerts of one run: what a firing says, and its way into the file of the node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from capd.errors import StoreError
from capd.rules.firing import Firing
from capd.rules.words import condition_text
from capd.space import if_full
from capd.store.alerts.alert import MAX_LISTED_SERIES, Alert, alert_number
from capd.store.alerts.file import AlertWriter

__all__ = ["RunAlerts", "alert_from"]

logger = logging.getLogger(__name__)


def alert_from(firing: Firing, node: str, time_ns: int) -> Alert:
    """Return the alert of a firing."""
    rule, paths = firing.rule, firing.paths
    first = next(iter(paths), "")
    others = f" and {len(paths) - 1} more series" if len(paths) > 1 else ""
    last = "; the last alert of this rule for today (max_per_day)" if firing.is_last else ""
    text = (
        f"{rule.name}: {rule.metric} = {firing.value:.6g}, limit {firing.limit:.6g} ({condition_text(rule)}), rank "
        f"{firing.rank}, iteration {firing.iteration}{f', {first}' if first else ''}{others}{last}"
    )
    return Alert(
        time_ns=time_ns,
        rule=rule.name,
        severity=rule.severity,
        metric=rule.metric,
        run=firing.run_id,
        node=node,
        rank=firing.rank,
        iteration=firing.iteration,
        micro_batch=firing.micro_batch,
        series=first,
        value=alert_number(firing.value),
        limit=alert_number(firing.limit),
        text=text,
        count=len(paths),
        series_paths=list(islice(paths, MAX_LISTED_SERIES)),
        attempt=firing.attempt,
    )


class RunAlerts:
    """The file of a run's alerts on this node."""

    def __init__(self, run: Path, node: str, *, durable: bool) -> None:
        """Remember the place."""
        self._run = run
        self._writer = AlertWriter(run, node, durable=durable)
        self._has_failed = False
        self._identity = _identity(run)

    @property
    def is_current(self) -> bool:
        """Whether the run still is the one of the first look, and not a new one of its name."""
        return self._identity == _identity(self._run)

    def earlier(self) -> list[Alert]:
        """Return the alerts that earlier daemons wrote; none if they cannot be read, which is logged."""
        try:
            return self._writer.begin()
        except (OSError, StoreError) as error:
            self._failed(error)
            return []

    def append(self, alerts: Sequence[Alert]) -> bool:
        """Store alerts. Return whether they are stored; the first failure is logged."""
        try:
            self._writer.append(alerts)
        except (OSError, StoreError) as error:
            self._failed(error)
            return False
        self._has_failed = False
        return True

    def _failed(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "[trigger] alerts of %s are only in this log: %s", self._run, if_full(error, self._run)
            )


def _identity(run: Path) -> tuple[int, int] | None:
    try:
        found = run.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
