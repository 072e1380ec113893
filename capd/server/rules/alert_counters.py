"""The counters of rules for metrics."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AlertCounters"]


class AlertCounters(NamedTuple):
    """Counts since the start of the daemon.

    Attributes:
        alerts: The alerts by run, rule and severity.
        suppressed: The firings that a cooldown or a limit of a day kept quiet.
        left_out: The committed records, and the errors of records, that no rule judged.
    """

    alerts: dict[tuple[str, str, str], int]
    suppressed: int
    left_out: int
