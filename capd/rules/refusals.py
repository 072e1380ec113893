"""What a daemon cannot do for rules that are right by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from capd.rules.metrics import RuleMetric
from capd.rules.ranges import ELEMENTS_OF
from capd.rules.schema import TriggerSettings

__all__ = ["refusals"]


def refusals(
    rules: Iterable[TriggerSettings], *, statistics: bool, keeps: bool, lab_formats: Collection[str]
) -> list[str]:
    """Return one sentence for each rule that a daemon refuses.

    Args:
        rules: Checked rules.
        statistics: Whether the daemon computes statistics of records.
        keeps: Whether it has a flight recorder.
        lab_formats: The formats whose errors its lab measures.
    """
    found = []
    for rule in rules:
        if rule.action == "keep" and not keeps:
            found.append(f'trigger {rule.name!r}: action: "keep" needs [window]; write "warn"')
        metric = rule.check()
        if metric.fmt:
            if metric.fmt not in lab_formats:
                found.append(f"trigger {rule.name!r}: metric: {_not_measured(metric, lab_formats)}")
        elif not statistics and metric.of != "rank":
            found.append(f"trigger {rule.name!r}: metric: {rule.metric} needs statistics = true in [daemon]")
    return found


def _not_measured(metric: RuleMetric, lab_formats: Collection[str]) -> str:
    has = f"it has {', '.join(lab_formats)}" if lab_formats else "it has none"
    kind, family = metric.text.partition(":")[0], metric.fmt.partition(":")[0]
    # The histogram of exponents counts these two for the elements of any format.
    elements = ELEMENTS_OF.get(family, ()) if kind in ("underflow", "saturation") else ()
    without = (
        f"; {' or '.join(f'{kind}:{one}' for one in elements)} counts without a scale" if elements else ""
    )
    return f"{metric.text} needs {metric.fmt} in [lab] formats; {has}{without}"
