"""The metrics as a JSON document, and as rows of a long table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from capd.analyze.groups import order_of
from capd.report.trends.gather import Group, TrendGroups, Trends
from capd.report.trends.kinds import TrendKind

__all__ = ["LONG_COLUMNS", "long_rows", "ordered_groups", "trend_document"]

LONG_COLUMNS = ("label", "iteration", "number", "value")
"""The columns of the long table that follow the metric and the fields. The iteration of all steps is empty."""


def trend_document(sources: Sequence[str], trends: Trends) -> dict[str, Any]:
    """Return the document. docs/json.md describes its fields."""
    return {
        "sources": list(sources),
        "by": list(trends.fields),
        "records": trends.records,
        "metrics": [_metric(one, trends) for one in trends.kinds],
        "sample": None if trends.sample is None else trends.sample.numbers(),
        "skipped": [{"name": one.name, "reason": one.reason} for one in trends.skipped],
    }


def ordered_groups(groups: TrendGroups) -> list[Group]:
    """Return the groups by their values, ascending; labels of one group stay in the order of their request."""
    return sorted(groups.groups, key=lambda group: order_of(group[0]))


def _remark(kind: TrendKind, groups: Sequence[dict[str, Any]]) -> str | None:
    """Return why numbers between steps are missing in every group; None if there are some."""
    if not kind.pairs or not groups or any(group["all"][kind.pairs] for group in groups):
        return None
    return "no tensor has two captured steps, so nothing is known from step to step"


def _metric(one: TrendGroups, trends: Trends) -> dict[str, Any]:
    counts = one.products
    groups = _groups(one, trends)
    return {
        "metric": one.kind.name,
        "title": one.kind.title,
        "formula": one.kind.formula,
        "groups": groups,
        "remark": _remark(one.kind, groups),
        "unmeasured": [{"reason": reason, "records": count} for reason, count in one.unmeasured.items()],
        "products": None
        if counts is None
        else {"found": counts.found, "measured": counts.measured, "left_out": counts.left_out},
    }


def _groups(one: TrendGroups, trends: Trends) -> list[dict[str, Any]]:
    return [
        {
            **dict(zip(trends.fields, values, strict=True)),
            "label": label,
            "all": (whole := one.whole((values, label))).numbers() | whole.details(),
            "steps": [
                {"iteration": iteration, **sums.numbers()}
                for iteration, sums in sorted(one.groups[values, label].items())
            ],
        }
        for values, label in ordered_groups(one)
    ]


def long_rows(document: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield a row for each number: the metric, the values of the fields, and LONG_COLUMNS."""
    fields = document["by"]
    for metric in document["metrics"]:
        for group in metric["groups"]:
            head = [metric["metric"], *(group[name] for name in fields), group["label"]]
            for step in ({"iteration": None, **group["all"]}, *group["steps"]):
                for name, value in step.items():
                    if name != "iteration" and not isinstance(value, dict):
                        yield [*head, step["iteration"], name, value]
