"""The tables of `capd metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.cli.output import human_count, json_number, note, print_lines
from capd.cli.table import Column, aligned, print_columns
from capd_client.process.text import human_value, printable

__all__ = ["csv_cell", "name_unmeasured", "print_trends"]

# The reasons that a line on stderr names.
_NAMED = 3


def print_trends(document: Mapping[str, Any], *, wide: bool) -> None:
    """Print a table for each metric: all steps of each group together."""
    is_first = True
    for metric in document["metrics"]:
        if metric["groups"]:
            print_lines([*([] if is_first else [""]), f"{metric['title']}: {metric['formula']}"])
            _print_table(document["by"], metric["groups"], wide=wide)
            is_first = False


def _print_table(fields: Sequence[str], groups: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    names = [name for name, value in groups[0]["all"].items() if not isinstance(value, dict)]
    has_labels = any(group["label"] for group in groups)
    columns = [Column(name, [human_value(group[name]) for group in groups], is_name=True) for name in fields]
    if has_labels:
        columns.append(Column("of", [group["label"] for group in groups], is_name=True))
    columns.append(
        Column("steps", [human_count(len(group["steps"])) for group in groups], right=True, spare=20)
    )
    for spare, name in enumerate(names):
        numbers = [group["all"][name] for group in groups]
        whole = all(value is None or isinstance(value, int) for value in numbers)
        cells = (
            ["-" if value is None else human_count(value) for value in numbers] if whole else aligned(numbers)
        )
        title = name.replace("_percent", " %").replace("_", " ")
        columns.append(Column(title, cells, right=True, spare=19 if whole else spare))
    print_columns(columns, wide=wide)


def name_unmeasured(document: Mapping[str, Any]) -> None:
    """Name on stderr, for each metric, how many records have no number, and the first reasons."""
    for metric in document["metrics"]:
        reasons = metric["unmeasured"]
        if metric["remark"]:
            note(f"{metric['metric']}: {metric['remark']}")
        for one in reasons[:_NAMED]:
            note(
                f"{metric['metric']}: {human_count(one['records'], 'record')} left out: {printable(one['reason'])}"
            )
        if reasons[_NAMED:]:
            note(
                f"{metric['metric']}: {human_count(len(reasons) - _NAMED, 'further reason')}; --json has all"
            )
        if metric["products"] is not None and metric["products"]["found"]:
            counts = metric["products"]
            note(
                f"{metric['metric']}: {human_count(counts['measured'])} of "
                f"{human_count(counts['found'], 'product')} measured"
            )


def csv_cell(value: Any) -> Any:
    """Return a value as CSV has it: nothing for None, and words for infinities."""
    return json_number(value) if isinstance(value, float) else "" if value is None else value
