"""What a daemon cannot do for rules that are right by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from capd.rules.schema import TriggerSettings

__all__ = ["refusals"]


def refusals(rules: Iterable[TriggerSettings], *, statistics: bool, keeps: bool) -> list[str]:
    """Return one sentence for each rule that a daemon refuses.

    Args:
        rules: Checked rules.
        statistics: Whether the daemon computes statistics of records.
        keeps: Whether it has a flight recorder.
    """
    found = []
    for rule in rules:
        if rule.action == "keep" and not keeps:
            found.append(f'trigger {rule.name!r}: action: "keep" needs [window]; write "warn"')
        if not statistics and rule.check().of != "rank":
            found.append(f"trigger {rule.name!r}: metric: {rule.metric} needs statistics = true in [daemon]")
    return found
