"""Rules in words, for `capd rules check` and for people who read an alert."""

from __future__ import annotations

from capd.rules.schema import BaselineSettings, TriggerSettings
from capd_client.rules.schema import texts

__all__ = ["condition_text", "rule_text"]

_SELECTED = (
    "include", "exclude", "layers", "components", "tensors", "operations", "phases", "series", "steps",
    "micro_batches", "ranks",
)  # fmt: skip

_ACTIONS = {
    "warn": "",
    "keep": ", and keeps the window",
    "capture": ", and captures every iteration from then on",
    "stop-capture": ", and captures nothing from then on",
}


def condition_text(rule: TriggerSettings) -> str:
    """Return the condition of a rule, such as "absmax above 448"."""
    parts = []
    if rule.above is not None:
        parts.append(f"above {rule.above:g}")
    if rule.below is not None:
        parts.append(f"below {rule.below:g}")
    if rule.factor_above is not None:
        base = rule.baseline or BaselineSettings()
        by = f" and by {base.min_delta:g}" if base.min_delta else ""
        parts.append(
            f"above {rule.factor_above:g} times{by} the {base.statistic} of {base.iterations} iterations "
            f"(at least {base.min})"
        )
    return f"{rule.metric} {' or '.join(parts)}"


def rule_text(rule: TriggerSettings) -> str:
    """Return a whole rule as one sentence."""
    metric = rule.check()
    chosen = [f"{name} {', '.join(texts(_text(rule, name)))}" for name in _SELECTED if _text(rule, name)]
    where = {"rank": "a rank", "scalar": "a rank", "tensor": "a tensor", "any": "a tensor or scalar"}[
        metric.of
    ]
    which = f" ({'; '.join(chosen)})" if chosen else ""
    row = f", {rule.for_} records in a row" if rule.for_ > 1 else ""
    command = f", and runs {rule.command[0]}" if rule.command else ""
    action = _ACTIONS[rule.action]
    if rule.post is not None:
        action += f" and {rule.post} iterations more"
    return (
        f"{rule.name}: {rule.severity} if {condition_text(rule)} in {where}{which}{row}; then quiet for "
        f"{rule.quiet_iterations} iterations, at most {rule.max_per_day} a day{command}{action}. "
        f"{rule.metric} is {metric.words}."
    )


def _text(rule: TriggerSettings, name: str) -> str | list[str] | None:
    value = getattr(rule, name)
    return str(value) if isinstance(value, int) else value
