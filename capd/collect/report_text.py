"""The report of a collection run as text: one line for each type, then a table for each field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from capd.collect.report import FIELDS
from capd.drops import describe_drops, left_out
from capd_client.process.text import human_count, human_nbytes, human_value, table_lines

__all__ = ["report_lines", "type_lines"]

_MAX_ROWS = 40
_STATISTICS = ("min", "max", "absmax", "mean", "std")
_COUNTS = ("nan", "inf", "zero")
_NUMBERS = ("records", "raw", *_STATISTICS, *_COUNTS)
_LABEL = "a label: the job computed the values by itself (emulation: none)"
Row = Mapping[str, Any]
Draw = Callable[[Sequence[str], Sequence[Sequence[str]], Iterable[str]], Sequence[str]]
"""Draws a table from its header, its rows, and the names of the columns that are aligned to the right."""


def report_lines(report: Row, draw: Draw = table_lines) -> Iterator[str]:
    """Yield the lines of a report of `capd.collect.report`. If captures were dropped, the first line says so.

    `draw` draws the tables.
    """
    total: dict[str, int] = {}
    for one in report["dropped"]:
        total[one["reason"]] = total.get(one["reason"], 0) + one["count"]
    losses = describe_drops(total)
    if losses:
        yield losses
    sizes = f"{human_nbytes(report['raw_bytes'])} raw, {human_nbytes(report['stored_bytes'])} stored"
    yield f"{human_count(report['records'], 'record')} in {report['path']}: {sizes}"
    for name, texts in report["emulation"].items():
        yield from _emulation_lines(name, texts)
    yield ""
    yield from type_lines(report["types"], draw)
    for name in FIELDS:
        yield ""
        yield from _table(name, report["by"][name], draw)
    yield ""
    yield from _drop_lines(report["dropped"], draw)
    if chosen := sorted(left_out(total)):
        yield f"{' and '.join(chosen)}: left out by the settings"


def _emulation_lines(quant_type: str, texts: Mapping[str, int]) -> Iterator[str]:
    for text, count in texts.items():
        of = f"{human_count(count, 'record')} of " if len(texts) > 1 else ""
        yield f"{of}{quant_type}: {_LABEL if text == 'none' else f'emulation: {text}'}"


def type_lines(types: Sequence[Row], draw: Draw = table_lines) -> Sequence[str]:
    """Return one line for each type: its outcome and its records. `types` are `TypeState`s as plain values."""
    rows = [
        (
            one["quant_type"],
            one["outcome"] or "not tried",
            human_count(one["micro_batches"]),
            human_count(one["records"]),
            f"{one['seconds']:.0f} s",
            str(one["tries"]),
            "-" if one["exit_code"] is None else str(one["exit_code"]),
            one["reason"],
        )
        for one in types
    ]
    header = ("type", "outcome", "micro-batches", "records", "time", "tries", "exit code", "why")
    return draw(header, rows, header[2:7])


def _table(name: str, groups: Sequence[Row], draw: Draw) -> Iterator[str]:
    rows = [
        (
            human_value(group["value"]),
            human_count(group["records"]),
            human_nbytes(group["raw_bytes"]),
            *(_number(group[each]) for each in _STATISTICS),
            *(human_count(group[each]) for each in _COUNTS),
        )
        for group in groups[:_MAX_ROWS]
    ]
    yield from draw((name, *_NUMBERS), rows, _NUMBERS)
    if len(groups) > _MAX_ROWS:
        yield f"… and {len(groups) - _MAX_ROWS:,} more: the JSON report has all"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _drop_lines(dropped: Sequence[Row], draw: Draw) -> Sequence[str]:
    if not dropped:
        return ["nothing was dropped"]
    rows = [(one["quant_type"] or "none", one["reason"], human_count(one["count"])) for one in dropped]
    return draw(("dropped of", "reason", "count"), rows, ("count",))
